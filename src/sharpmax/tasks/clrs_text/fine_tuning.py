"""Fine-tuning of a language model on CLRS-Text, on one process or several, that goes on after a kill to the same bits.

    OUT/checkpoint.json, OUT/checkpoint-STEP/   where the run stands
    OUT/log.jsonl                               loss and speed, a line for every few steps
    OUT/model/                                  the trained model, as transformers reads it; made at the end
    OUT/training.json                           settings, counts, speed, loss curve; written last

A step never waits for the device: what depends on the data is worked out on the host (:mod:`.loss`), losses are summed
up on the device, and read when a line is logged.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...extras import require

for _package in ("torch", "transformers", "accelerate", "safetensors"):
    require(_package, "models", "sharpmax.tasks.clrs_text.train")

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import gather_object  # noqa: E402
from torch import Tensor  # noqa: E402

from ...core.claims import claimed  # noqa: E402
from ...core.files import write_text  # noqa: E402
from ...inputs import InputError, user_input  # noqa: E402
from ...provenance import continued, provenance  # noqa: E402
from . import checkpoints  # noqa: E402
from .journal import NAME as LOG  # noqa: E402
from .journal import Journal, Window, totals  # noqa: E402
from .loader import Loader  # noqa: E402
from .loss import DOCUMENTS, prepared  # noqa: E402
from .models import check_dtype, config_of, encoder_for, save_model, start_of  # noqa: E402
from .outcomes import read_report  # noqa: E402
from .packing import Packer  # noqa: E402
from .preparation import find_accelerator, find_network, find_optimizer, find_samples, ready, resolved  # noqa: E402
from .schedule import rate_at  # noqa: E402
from .settings import Settings  # noqa: E402
from .tokens import Encoder  # noqa: E402

RESULT = "training.json"
MODEL = "model"

Progress = Callable[[int, int, dict[str, Any] | None], None]
"""Called with the steps done, the steps in all, and a line of the log where there is a new one."""


def train(
    settings: Settings,
    out: str | Path,
    *,
    minutes: float | None = None,
    save_dtype: str = "float32",
    cpu: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any] | None:
    """Train a model, or go on with a run that was stopped.

    Args:
      settings: what to train, and how. A folder that holds a run with others is refused.
      out: the folder of the run.
      minutes: save and leave after so many; the same call goes on. Told when a line is logged.
      save_dtype: of the weights in the model's folder.
      cpu: stay on the CPU where there is a GPU.
      progress: shown how far it is.

    Returns:
      What ``training.json`` holds, or ``None`` if time was up before the end.
    """
    began = time.monotonic()
    check_dtype(save_dtype)
    settings, out = resolved(settings, cpu=cpu), Path(out)
    if (result := finished(settings, out)) is not None:
        return result
    run = Run.begin(settings, out, cpu=cpu)
    return run.complete(progress, None if minutes is None else began + 60 * minutes, save_dtype)


def finished(settings: Settings, out: Path) -> dict[str, Any] | None:
    """What a finished run with these settings wrote into the folder, if there is one; another one's is refused."""
    if not (out / RESULT).is_file():
        return None
    result = read_report(out / RESULT)
    settings.check_same(result["settings"], f"{out} holds a finished run")
    network, _ = find_network(settings)
    checkpoints.check_start(result, config_of(network), start_of(network), out)
    return result


@contextlib.contextmanager
def _held(out: Path, content: dict[str, Any] | None) -> Iterator[None]:
    """Within, nobody else trains in the folder; ValueError if somebody does, or has since ``content`` was read."""
    with claimed(out) as mine:
        if not mine or (out / RESULT).exists() or checkpoints.read(out) != content:
            raise ValueError(f"expected a folder that nobody trains in, got {str(out)!r}, where a run is going on")
        yield


def _check_model(settings: Settings, out: Path) -> None:
    """Refuse a folder in which the trained model would replace another one."""
    model = out / MODEL
    begun = (out / checkpoints.POINTER).exists() or (out / LOG).exists()
    if model.exists() and (not begun or Path(settings.model).resolve() == model.resolve()):
        raise ValueError(
            f"expected a folder for a new run, got {str(out)!r}, whose {MODEL} would be replaced: choose another"
        )


@dataclass
class Run:
    """A run: what is trained, and where it stands."""

    settings: Settings
    out: Path
    accelerator: Accelerator
    tokenizer: Any
    encoder: Encoder
    network: Any
    """The model of transformers."""
    start: str
    """What it began with (:func:`.models.start_of`)."""
    learner: Any
    """The model with its loss, as Accelerate wrapped it."""
    optimizer: Any
    loader: Loader
    journal: Journal | None
    step: int = 0
    seconds: float = 0.0
    memory: int = 0
    before: dict[str, Any] = field(default_factory=dict)
    """What made the checkpoint that this went on from."""
    hold: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Of the folder, until the run is complete."""

    @staticmethod
    def begin(settings: Settings, out: Path, *, cpu: bool = False) -> Run:
        """A run at its beginning, or where its last checkpoint left it; ``settings`` are :func:`resolved`."""
        _check_model(settings, out)
        accelerator = find_accelerator(settings, cpu=cpu)
        ranks, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
        settings.accumulation(ranks)
        content = checkpoints.read(out)
        if content is not None:
            settings.check_same(content["settings"], f"{out} holds a run")
            if len(content["processes"]) != ranks:
                raise ValueError(f"expected {len(content['processes'])} processes, as {out} began with, got {ranks}")
        samples = find_samples(settings, rank=rank, ranks=ranks)
        network, tokenizer = find_network(settings)
        start = start_of(network)
        if content is not None:
            checkpoints.check_start(content, config_of(network), start, out)
        encoder = encoder_for(tokenizer)
        packer = Packer(samples, encoder, length=settings.length, answers_only=settings.answers_only)
        next(packer.part(0, 1))  # samples that cannot be read or never fit are told before anything else is done
        learner: Any = ready(network, settings)
        optimizer: Any = find_optimizer(learner, settings, fused=device.type == "cuda")
        learner, optimizer = accelerator.prepare(learner, optimizer)
        loader = Loader(packer, settings.micro, workers=settings.workers)
        run = Run(settings, out, accelerator, tokenizer, encoder, network, start, learner, optimizer, loader, None)
        if content is not None:
            run._restore(content)
        if accelerator.is_main_process:
            run.hold.enter_context(_held(out, content))
            run.journal = Journal(out, run.step)
        return run

    def _restore(self, content: dict[str, Any]) -> None:
        checkpoints.restore(self.out, content, self.learner, self.optimizer.optimizer)
        mine = content["processes"][self.accelerator.process_index]
        self.loader.restore(mine["loader"])
        checkpoints.set_random_state(mine["random"])
        self.step, self.seconds, self.memory = content["step"], content["seconds"], content["memory"]
        self.before = content.get("provenance", {})

    def complete(
        self, progress: Progress | None = None, until: float | None = None, save_dtype: str = "float32"
    ) -> dict[str, Any] | None:
        """Train to the end and write the results; ``None`` if the time ``until`` came before."""
        try:
            ended = self.go_on(progress, until)
            return self.finish(save_dtype) if ended else None
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"the device has no memory for {self.settings.micro} sequences of {self.settings.length:,} tokens at a "
                f"time: try a smaller --micro, or --gradient-checkpointing; {checkpoints.kept(self.out)}"
            ) from error
        finally:
            self.hold.close()

    def go_on(self, progress: Progress | None = None, until: float | None = None) -> bool:
        """Train to the end, and say whether it was reached before the time ``until`` (of ``time.monotonic``)."""
        settings, steps = self.settings, self.settings.steps
        with contextlib.closing(self._batches()) as batches:
            window = Window(self.step)
            while self.step < steps:
                self._take_step(batches, window)
                self.step += 1
                last = self.step == steps
                saving = self.step % settings.checkpoint_every == 0 and not last
                line = None
                if saving or last or self.step % settings.log_every == 0:
                    line = self._log(window)
                    late = not last and self._is_late(until)
                    if saving or late:
                        self._save()
                    if late:
                        return False
                    window = Window(self.step)
                if progress is not None:
                    progress(self.step, steps, line)
        return True

    def _batches(self) -> Generator[tuple[dict[str, Tensor], int]]:
        """What the learner takes, on the device, and how many labels are in it."""
        device = self.accelerator.device
        gpu = device.type == "cuda"
        chunk = self.accelerator.unwrap_model(self.learner).chunk if gpu or self.settings.compile else 1
        sizes = {"chunk": chunk, "documents": DOCUMENTS if gpu else 1}
        with contextlib.closing(iter(self.loader)) as batches:  # pyright: ignore[reportArgumentType]
            for batch in batches:
                tensors, labels = prepared(batch, **sizes)
                held = {k: v.pin_memory() for k, v in tensors.items()} if gpu else tensors
                yield {k: v.to(device, non_blocking=True) for k, v in held.items()}, labels

    def _take_step(self, batches: Iterator[tuple[dict[str, Tensor], int]], window: Window) -> None:
        """One step of the optimiser."""
        settings, accelerator = self.settings, self.accelerator
        ranks = accelerator.num_processes
        clock = time.monotonic()
        with user_input():
            parts = [next(batches) for _ in range(settings.accumulation(ranks))]
        window.waited += time.monotonic() - clock
        labels: Any = sum(count for _, count in parts)
        if ranks > 1:  # gradients are means over processes, so the sum over labels is divided by labels / processes
            total = torch.tensor(float(labels)).to(accelerator.device, non_blocking=True)
            labels = self._over_processes(total, "sum") / ranks
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate
        for i, (tensors, _) in enumerate(parts):
            last = i == len(parts) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self.learner):
                loss = self.learner(**tensors) / labels
                accelerator.backward(loss)
            window.losses.append(loss.detach())
        norm: Any = accelerator.clip_grad_norm_(list(self.learner.parameters()), settings.clip)
        window.norms.append(getattr(norm, "full_tensor", lambda: norm)())
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def _rate(self) -> float:
        s = self.settings
        return rate_at(self.step, s.steps, peak=s.learning_rate, warmup=s.warmup, final=s.final)

    def _log(self, window: Window) -> dict[str, Any]:
        """Write a line of the log. Here the host waits for the device."""
        settings, accelerator = self.settings, self.accelerator
        rate = self.optimizer.param_groups[0]["lr"]
        steps = self.step - window.first
        mean = self._over_processes(torch.stack(window.losses).sum() / steps, "mean").item()
        broken = self._over_processes((~torch.stack(window.norms).isfinite()).sum().float(), "sum").item()
        if broken or not math.isfinite(mean):
            what = "gradient" if math.isfinite(mean) else "loss"
            raise InputError(
                f"the {what} is no number after step {self.step}, with a learning rate of {rate:.3g}: try a lower one; "
                f"{checkpoints.kept(self.out)}"
            )
        if accelerator.device.type == "cuda":
            self.memory = max(self.memory, torch.cuda.max_memory_allocated(accelerator.device))
        line = {"step": self.step, "loss": mean, "learning_rate": rate}
        line |= window.summary(self.step, settings.batch * settings.length)
        self.seconds += line["step_seconds"] * steps
        line |= {"seconds": self.seconds, "memory": self.memory or None}
        if self.journal is not None:
            self.journal.add(line)
        return line

    def _is_late(self, until: float | None) -> bool:
        """Whether time is up, for any of the processes."""
        if until is None:
            return False
        late = torch.tensor(float(time.monotonic() > until), device=self.accelerator.device)
        return bool(self._over_processes(late, "sum").item())

    def _over_processes(self, number: Tensor, how: str) -> Tensor:
        """The ``sum`` or the ``mean`` of a number of every process, which nothing waits for."""
        reduced = self.accelerator.reduce(number, how)
        assert isinstance(reduced, Tensor)
        return reduced

    def _save(self) -> None:
        main = self.accelerator.is_main_process
        mine = {"loader": self.loader.state(), "random": checkpoints.random_state()}
        record = {
            "settings": self.settings.to_json(),
            "config": config_of(self.network),
            "start": self.start,
            "seconds": self.seconds,
            "memory": self.memory,
            "processes": gather_object([mine]),
            "provenance": self._made() if main else {},
        }
        checkpoints.save(self.out, self.step, self.learner, self.optimizer.optimizer, record, main=main)
        self.accelerator.wait_for_everyone()

    def _made(self) -> dict[str, Any]:
        return continued(provenance(), self.before)

    def finish(self, dtype: str = "float32") -> dict[str, Any]:
        """Write the model and what there is to say of the run; checkpoints are removed."""
        tensors = checkpoints.weights(self.learner)
        loaders = gather_object([self.loader.counts])
        result = self._result(loaders)
        if self.journal is not None:
            names = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
            save_model(self.network, self.tokenizer, names, self.out / MODEL, dtype)
            result |= self.journal.summary() | {"provenance": self._made()}
            write_text(self.out / RESULT, json.dumps(result, indent=1) + "\n")
            checkpoints.remove(self.out)
        self.accelerator.wait_for_everyone()
        return result

    def _result(self, loaders: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "settings": self.settings.to_json(),
            "split": self.loader.packer.samples.source.split.to_json(),
            "config": config_of(self.network),
            "start": self.start,
            "begin": self.encoder.begin,
            "parameters": sum(p.numel() for p in self.network.parameters()),
            "processes": self.accelerator.num_processes,
            "steps": self.step,
            "counts": totals(loaders, self.settings.length),
            "seconds": self.seconds,
        }
