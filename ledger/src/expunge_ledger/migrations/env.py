"""Alembic's door: migrations run on the connection that is handed in."""

from alembic import context

if hasattr(context, "config"):
    context.configure(connection=context.config.attributes["connection"])
    with context.begin_transaction():
        context.run_migrations()
