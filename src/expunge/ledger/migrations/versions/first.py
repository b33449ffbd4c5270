"""Events, models, requests, work and releases."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None
LIVE = sa.text("state IN ('open', 'running')")
BEGUN = sa.text("state = 'begun'")


def upgrade() -> None:
    op.create_table(
        "book",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("ledger", sa.String(64), nullable=False),
        sa.Column("check", sa.String(64), nullable=False),
        sa.Column("events", sa.Integer, nullable=False),
        sa.Column("head", sa.String(64), nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("at", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("seal", sa.String(64), nullable=False),
    )
    op.create_table(
        "models",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(100), nullable=False, unique=True),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("releases", sa.Text, nullable=False),
        sa.Column("identity", sa.String(64), nullable=False),
        sa.Column("registered", sa.String(32), nullable=False),
        sa.Column("worker", sa.String(100)),
        sa.Column("until", sa.String(32)),
    )
    op.create_table(
        "requests",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("person", sa.String(64), nullable=False),
        sa.Column("scope", sa.Integer, nullable=False),
        sa.Column("sealed", sa.LargeBinary),
        sa.Column("reason", sa.LargeBinary),
        sa.Column("received", sa.String(10), nullable=False),
        sa.Column("due", sa.String(10), nullable=False),
        sa.Column("filed", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("answer", sa.String(32)),
        sa.Column("ended", sa.String(32)),
        sa.Column("why", sa.LargeBinary),
    )
    op.create_index("requests_person", "requests", ["person"])
    op.create_index("requests_state", "requests", ["state"])
    op.create_index(
        "requests_once", "requests", ["person", "scope"],
        unique=True, sqlite_where=LIVE, postgresql_where=LIVE,
    )  # fmt: skip
    op.create_table(
        "releases",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("model", sa.Integer, sa.ForeignKey("models.id"), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("directory", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("replay", sa.Integer, nullable=False),
        sa.Column("begun", sa.String(32), nullable=False),
        sa.Column("finished", sa.String(32)),
        sa.Column("certificate", sa.String(64)),
        sa.Column("parent", sa.String(64)),
        sa.UniqueConstraint("model", "number"),
    )
    op.create_index(
        "releases_one_begun", "releases", ["model"],
        unique=True, sqlite_where=BEGUN, postgresql_where=BEGUN,
    )  # fmt: skip
    op.create_table(
        "work",
        sa.Column("request", sa.Integer, sa.ForeignKey("requests.number"), primary_key=True),
        sa.Column("model", sa.Integer, sa.ForeignKey("models.id"), primary_key=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("outcome", sa.String(32)),
        sa.Column("release", sa.Integer, sa.ForeignKey("releases.id")),
        sa.Column("readmitted", sa.String(32)),
    )
    op.create_index("work_state", "work", ["model", "state"])
    op.create_table(
        "named",
        sa.Column("release", sa.Integer, sa.ForeignKey("releases.id"), primary_key=True),
        sa.Column("request", sa.Integer, sa.ForeignKey("requests.number"), primary_key=True),
    )
