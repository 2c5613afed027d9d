"""A callback: an exponential mean of the loss, as lines of "STEP MEAN" in RUN_DIR/smoothed_loss.txt."""

from gpt_pretrain import extend
from my_lab.settings import MyLab


@extend.callback("smoothed_loss")
class SmoothedLoss(extend.Callback):
    """Waits for the loss of each step."""

    def start(self, run: extend.Run) -> None:
        """Keeps the lines of an earlier start, up to the step that this one resumes from."""
        self.beta = extend.own_keys(run.config, MyLab).beta
        if not 0 <= self.beta < 1:
            raise extend.UserError(f"my_lab.beta={self.beta} is not at least 0 and below 1; use 0.9")
        self.file = run.run_dir / "smoothed_loss.txt"
        self.lines = self.file.read_text().splitlines()[: run.step] if self.file.exists() else []

    def after_step(self, run: extend.Run) -> None:
        """Adds a line."""
        loss = run.read_loss()
        past = float(self.lines[-1].split()[1]) if self.lines else loss
        self.lines.append(f"{run.step} {self.beta * past + (1 - self.beta) * loss}")
        if run.rank == 0:
            self.file.write_text("\n".join(self.lines))
