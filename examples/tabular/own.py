"""A table of tumours, three rows for each patient; three patients leave: python own.py"""

import tempfile
from pathlib import Path

from sklearn.datasets import load_breast_cancer

import expunge
from expunge.linear_model import LogisticRegression


def main(folder: Path) -> None:
    """Learn, forget, certify, verify; without torch."""
    rows, targets = load_breast_cancer(return_X_y=True)
    patients = [f"patient-{i // 3:03d}" for i in range(len(rows))]
    test = [int(name[-3:]) % 3 == 2 for name in patients]
    train = [not held for held in test]
    ids = [name for name, kept in zip(patients, train, strict=True) if kept]
    model = LogisticRegression(standardise=True, state=folder / "state")
    model.fit(rows[train], targets[train], ids=ids)
    print(f"all patients: {model.score(rows[test], targets[test]):.1%} right")
    model.release().save(folder / "release-1")

    gone = Path(__file__).with_name("forget.txt").read_text().split()
    release = model.forget(gone)
    release.save(folder / "release-2")
    found = expunge.verify(folder / "release-2", parent=folder / "release-1", people=gone)
    print(f"without {', '.join(gone)}: {model.score(rows[test], targets[test]):.1%} right")
    print(f"epsilon = {found.certificate.epsilon:g}, {found.certificate.forget.samples} rows went")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
