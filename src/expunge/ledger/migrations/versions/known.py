"""Whom the data of a job ever held."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0003", "0002"


def upgrade() -> None:
    op.create_table(
        "known",
        sa.Column("model", sa.Integer, sa.ForeignKey("models.id"), primary_key=True),
        sa.Column("weights", sa.String(64), nullable=False),
        sa.Column("marks", sa.LargeBinary, nullable=False),
    )
