"""All tables. Whoever changes schema.py next writes these out here, and the change beside them."""

from alembic import op

from expunge_ledger.schema import METADATA

revision, down_revision = "0001", None


def upgrade() -> None:
    METADATA.create_all(op.get_bind())
