"""Two people leave a classifier that the Trainer trained: python forget.py"""

from own import FOLDER, build, load, train
from transformers import BertForSequenceClassification

import expunge

if __name__ == "__main__":
    data, old = load(), FOLDER / "trained" / "final"
    release = expunge.retrain(build, data, forget=["person-03", "person-17"], train=train, old=old)
    expunge.verify(release.save(FOLDER / "run"))
    model = BertForSequenceClassification.from_pretrained(FOLDER / "run")
    print(f"run: epsilon = {release.certificate.epsilon:g}", end=", ")
    print(f"{expunge.evaluate(model, data.test).accuracy:.1%} right")
