"""Tokens of the server, and what was filed with them."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    op.create_table(
        "tokens",
        sa.Column("name", sa.String(100), primary_key=True),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        sa.Column("model", sa.String(100)),
        sa.Column("created", sa.String(32), nullable=False),
    )
    op.create_table(
        "filings",
        sa.Column("token", sa.String(100), primary_key=True),
        sa.Column("request", sa.Integer, sa.ForeignKey("requests.number"), primary_key=True),
    )
