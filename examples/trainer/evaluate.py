"""The released adapter on the public base, evaluated by the Trainer; beside one that the Trainer
trains again without these people."""

from own import FOLDER, build, load_base, make_trainer
from peft import PeftModel

import expunge

if __name__ == "__main__":
    gone = (FOLDER / "forget.txt").read_text().split()
    released = make_trainer(PeftModel.from_pretrained(load_base(), FOLDER / "run" / "adapter"))
    again = make_trainer(build(), "again", without=gone)
    again.train()
    found, other = (trainer.evaluate() for trainer in (released, again))
    low, high = expunge.Evaluation(
        other["eval_accuracy"], other["eval_loss"], len(again.eval_dataset)
    ).interval()
    print(f"run/adapter: accuracy {100 * found['eval_accuracy']:.1f} %")
    print(f"retrained: {other['eval_accuracy']:.1%}, with 99 % confidence {low:.1%} to {high:.1%}")
    print("level" if low <= found["eval_accuracy"] else "not level")
