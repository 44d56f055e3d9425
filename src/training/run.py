"""One run of open_clip's training program with the recipe, from a parsed command line to its exit status."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import open_clip
import open_clip_train.main as host
import torch
from open_clip_train.distributed import world_info_from_env

from open_clip_zerovl.checkpoints.loading import MODEL_ENTRY
from open_clip_zerovl.checkpoints.weights import ENTRY
from open_clip_zerovl.core.errors import UserError, first_line, say
from open_clip_zerovl.core.files import reading
from open_clip_zerovl.core.processes import PREEMPTED_STATUS, REQUEUE_MARKER, require_threads
from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.dga.model import unwrapped
from open_clip_zerovl.models.build import (
    check_model,
    create_model_and_transforms,
    registered_config,
    with_text_model,
)
from open_clip_zerovl.models.configs import no_code_from_data
from open_clip_zerovl.recipe.flags import AllFlags
from open_clip_zerovl.recipe.gpu import compile_blocks
from open_clip_zerovl.recipe.mixup import CoinFlipMixup
from open_clip_zerovl.recipe.towers import lora_entry
from training import checkpointing, data, model, stopping
from training.hooks import HostLine, check_host, replaced
from training.log import RunLog, early_handler, shorten
from training.params import require_new_name
from training.train import Planned, Trainer, create_loss, require_finite


def train(args: argparse.Namespace, config: AllFlags) -> int:
    """Run open_clip's main with the recipe and return the exit status (see `main.main`).

    Errors are raised.
    """
    # Loader workers are forked after the tokenizer was used. Its threads are not forked, and a worker would wait for them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _, rank, _ = world_info_from_env()
    early, run = early_handler(), None
    try:
        line = check_host()
        if rank == 0 and (warning := line.release.untested(open_clip.__version__)) is not None:
            logging.warning(f"{warning[0].upper()}{warning[1:]}.")
        if config.active and rank == 0:
            # open_clip's main does so only after the data is opened
            logging.root.setLevel(logging.INFO)
        run = TrainingRun(args, config, line)
        run.open(rank)
        run.start()
    except Planned as planned:
        if rank == 0:
            print(*planned.lines, sep="\n", flush=True)
    except stopping.Stopped as stopped:
        assert run is not None
        return run.stopped(stopped, rank)
    finally:
        logging.root.removeHandler(early)
        if run is not None and run.lock is not None:
            os.close(run.lock)
    return 0


class TrainingRun:
    """One run of open_clip's main, whose public methods after `start` are the hooks that `hooks.HostLine` calls.

    Attributes:
        line: the line of the installed open_clip.
        model_name: the name under which open_clip knows the model and its tokenizer.
        own_step, own_schedule, own_adamw: whether the run takes our step, our learning rates, our groups of parameters.
        fresh: whether the run's folder was empty before.
        trained: whether an optimizer step was taken.
    """

    def __init__(self, args: argparse.Namespace, config: AllFlags, line: HostLine) -> None:
        self.log = RunLog(args, config)
        self.args = args
        self.config = config
        self.line = line
        self.resumes_latest = args.resume == "latest"  # main puts the file's name in its place
        self.own_step = config.own_step
        self.own_schedule = config.lr_min is not None or config.warmup_share is not None
        self.own_adamw = config.no_embedding_decay or config.own_rates
        self.preemption = stopping.Preemption()
        self._handlers = ExitStack()
        # set by `open`
        self.model_name = args.model
        self.inputs = data.TrainingInputs()
        self.lock: int | None = None
        self.fresh = False
        # set by the hooks, in main's order
        self.model: torch.nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.mixup: CoinFlipMixup | None = None
        self.batches: Any = None
        self.transform: Any = None  # of pictures that are evaluated
        self.resumed: checkpointing.Position | None = None
        self.teacher: torch.nn.Module | None = None  # of --distill-model
        self.trainer: Trainer | None = None
        self.trained = False
        # of each checkpoint
        self.entries: dict[str, Any] = {}

    @property
    def folder(self) -> Path:
        """Return the run's folder.

        It has a name once open_clip's main has begun.
        """
        return Path(self.args.logs) / self.args.name

    def open(self, rank: int) -> None:
        """Check device, optimizer and model, open the data, register the model of `--text-model`, prepare the run's folder.

        The first rank locks the folder, and deletes the marker of an earlier stop and half-written files of killed processes.

        Raises:
            UserError: something that cannot be used, or another process that trains a run of this name.
        """
        args, config = self.args, self.config
        check_model(
            args.model, text_model=config.text_model, pretrained_image=args.pretrained_image,
            context_length=args.force_context_length,
        )  # fmt: skip
        model.settle_device(args, recipe=config.active)
        if config.text_model is not None:
            self.model_name = with_text_model(args.model, config.text_model)
        if config.sampling is not None:
            logging.info(f"Opening {args.train_data}")
        self.inputs = data.open_inputs(config, args)
        self.config = data.with_positives(config, self.inputs.sources)
        if self.config is not config:
            args.positives = self.config.positives
        if config.active:
            self.entries[checkpointing.SETTINGS_ENTRY] = checkpointing.settings_of(
                args, data.batching_of(config, args), self.inputs.sources
            )
        if rank != 0 or args.name is None:
            return
        self.lock = checkpointing.lock_folder(self.folder)
        require_new_name(args)  # it may have been taken while this process waited
        self.fresh = [path.name for path in self.folder.iterdir()] == [checkpointing.LOCK]
        (self.folder / REQUEUE_MARKER).unlink(missing_ok=True)
        checkpointing.remove_leftovers(self.folder / "checkpoints")

    def start(self) -> None:
        """Run open_clip's main.

        A run that ends before its first step removes its folder, which would block its name.

        Raises:
            UserError: the run cannot go on.
            Stopped: the run was asked to stop.
        """
        hooks = self.line.filled(self, host)
        try:
            with (
                replaced(hooks, self.checkpoint_entry, self.compiled if self.own_step else None),
                no_code_from_data(),
                ExitStack() as self._handlers,
            ):
                self._run_main()
        except BaseException as raised:  # also for an interrupt or a defect
            sentence = self._lost_worker(raised)
            error = raised if sentence is None else UserError(sentence)
            if self.trained and not isinstance(error, stopping.Stopped | KeyboardInterrupt):
                self.log.end("failed", first_line(error))
                self._keep_traceback(error)
            if self.config.plan or (self.fresh and not self.trained):
                shutil.rmtree(self.folder, ignore_errors=True)
            if self.config.plan:
                with suppress(OSError):  # another run without a trace is in it
                    self.folder.parent.rmdir()
            if error is not raised:
                raise error from raised
            raise
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _lost_worker(self, error: BaseException) -> str | None:
        """Make the sentence for an error about a lost loader worker, which torch raises at any place in the process."""
        loader = getattr(self.batches, "unwrapped", self.batches)
        if not isinstance(error, RuntimeError) or not isinstance(loader, MixtureLoader):
            return None
        sentence = loader.explain(error)
        if sentence is not None:
            loader.abandon()
        return sentence

    def _run_main(self) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            require_threads()
        try:
            status = host.main([])  # parse_args is a hook: the arguments are parsed already
        except stopping.Stopped as stopped:
            if self.args.rank == 0:
                self.log.end(
                    "stopped", f"Step {stopped.step} of epoch {stopped.epoch} was the last."
                )
                self._leave(stopped)
            self.preemption.wait_for_all()
            raise
        if status not in (None, 0):
            raise UserError(f"open_clip's main gave up with status {status}; its message is above")
        self.log.end("done")

    def _keep_traceback(self, error: BaseException) -> None:
        """Write the traceback of a defect into the run's folder: hours of training may come before it."""
        told = (
            isinstance(error, UserError | OSError | SystemExit)
            or stopping.sentence_of(error) is not None
        )
        if told or not self.folder.is_dir():
            return
        file = self.folder / f"traceback-rank{self.args.rank}.txt"
        file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        logging.error(f"The traceback is in {file}.")

    def _leave(self, stopped: stopping.Stopped) -> None:
        """Write the launcher's marker on the first rank of a stopped run, and sync to the remote store for the last time."""
        if not stopped.saved:
            return
        if stopped.asked == stopping.PREEMPTED:
            (self.folder / REQUEUE_MARKER).write_text(
                "start again with --resume latest\n", encoding="utf-8"
            )
        if self.args.remote_sync is not None:
            stopping.end_children()  # ends the process that syncs periodically
            host.remote_sync(
                str(self.folder),
                os.path.join(self.args.remote_sync, self.args.name),
                self.args.remote_sync_protocol,
            )

    def stopped(self, stop: stopping.Stopped, rank: int) -> int:
        """Print how to resume a stopped run, and return its exit status."""
        interrupted = stop.asked == stopping.INTERRUPTED
        if not stop.saved:
            status = 128 + (signal.SIGINT if interrupted else signal.SIGTERM)
            words = f"stopped after step {stop.step} of epoch {stop.epoch}; nothing is saved: --logs {self.args.logs}"
        else:
            status = 128 + signal.SIGINT if interrupted else PREEMPTED_STATUS
            words = (
                f"stopped; step {stop.step} of epoch {stop.epoch} is saved. The same command goes on from there with --name "
                f"{self.args.name} --resume latest"
            )
            if not interrupted:
                words += f"; left {self.folder / REQUEUE_MARKER} for the launcher"
        if rank == 0:
            say(f"training.main: {words}.")
        return status

    # -----------------------------------------------------------------------------------------------------------------
    # The hooks, in the order in which main calls them
    # -----------------------------------------------------------------------------------------------------------------

    def create_model(
        self, model_name: str, pretrained: str | None = None, **options: Any
    ) -> tuple[Any, Any, Any]:
        """Build the model and the transforms of training and evaluation, in place of open_clip's function."""
        if self.lock is None and self.args.rank == 0 and self.args.name is not None:
            # Without --name, main has made one up; a run that is started in the same second gets the same.
            self.lock = checkpointing.lock_folder(self.folder)
        if self.model is not None:  # main makes the teacher after it: --distill-model
            self.teacher, *transforms = create_model_and_transforms(
                model_name, pretrained, **options
            )
            return self.teacher, *transforms
        if self.config.active and (model_cfg := registered_config(self.args.model)):
            forced = {"quick_gelu": True} if self.args.force_quick_gelu else {}
            self.entries = {**self.entries, MODEL_ENTRY: {**model_cfg, **forced}}
        # Only with our data: open_clip's cannot go on in the middle of an epoch, so a step checkpoint would be of no use.
        if self.config.sampling is not None:
            # Not before all ranks have met: a rank that waits for one that has failed must still end by SIGTERM.
            self._handlers.enter_context(self.preemption)
        else:
            stopping.end_by_signals()
        if self.config.active and not self.args.debug:
            shorten(self.args.rank)
        if self.args.rank == 0:
            logging.info(f"Building {self.args.model}")
        created = model.create_model(self.config, self.args, self.model_name, pretrained, **options)
        self.model, transform_train, transform_eval, self.mixup = created
        if self.config.lora is not None:
            self.entries = {**self.entries, ENTRY: lora_entry(self.config.lora)}
        if self.own_step:
            model.check_contrastive(self.model, self.args.model)
        if (
            self.config.active
            and self.args.rank == 0
            and self.args.train_data
            and self.args.logs.lower() != "none"
        ):
            checkpointing.require_room(self.folder, self.model)
        return self.model, transform_train, transform_eval

    def compiled(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """Replace each block of main's model by its compiled form for `--torchcompile`.

        The first step comes much sooner than with one graph of all blocks. open_clip 4 has a flag for it.

        Returns:
            None for a model without blocks, and for any other.
        """
        inner, _ = unwrapped(model)
        blocks = compile_blocks(inner) if inner is self.model else 0
        if not blocks:
            return None
        logging.info(f"Compiling {blocks} blocks of the model, each by itself.")
        return model

    def create_optimizer(
        self, stock: Callable[[], torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        """Build AdamW on our groups from (lr, betas, eps), where `own_adamw`, else call `stock()`.

        On a resume it keeps its settings.
        """
        assert self.model is not None  # main makes the optimizer after it
        if self.own_adamw:
            optimizer = model.create_adamw(self.model, self.config, self.args.wd, **options)
        else:
            optimizer = stock()
        self.optimizer = checkpointing.keep_settings(optimizer, taken=self.config.active)
        return self.optimizer

    def cosine_lr(
        self,
        optimizer: torch.optim.Optimizer,
        base_lr: float,
        warmup_length: int,
        steps: int,
        **_: Any,
    ):
        """Schedule the rate as open_clip does, or as our own where `own_schedule`."""
        share = self.config.warmup_share
        warmup = warmup_length if share is None else round(share * steps)
        return model.cosine_lr(optimizer, base_lr, warmup, steps, lr_min=self.config.lr_min or 0.0)

    def get_data(
        self, stock: Callable[..., dict], args: argparse.Namespace, transforms, tokenizer
    ) -> dict:
        """Open the data by name.

        `stock(args)` is open_clip's own. Its training data yields batches for the loop of `train_epoch`.
        """
        transform, self.transform = transforms
        opened = data.get_data(self.config, self.inputs, stock, args, transform, tokenizer)
        self.batches = opened["train"].dataloader if "train" in opened else None
        return opened

    def load_checkpoint(self, file_path: str, map_location: Any = None) -> dict:
        """Load the checkpoint with bare names, checked against the model and this run's settings."""
        if self.args.rank == 0:
            logging.info(f"Reading {file_path}")
        # `newest_whole` has compared the checksums of a file that it chose
        chosen = self.resumes_latest and not self.args.save_most_recent
        checkpoint = checkpointing.load_checkpoint(file_path, map_location, checksums=not chosen)
        assert self.model is not None  # main loads weights into it
        with reading(file_path, "resume from another checkpoint"):
            checkpointing.require_finite(checkpoint, self.model, file_path)
            checkpointing.require_same_function(
                checkpoint, self.entries.get(MODEL_ENTRY), file_path
            )
            self.resumed = checkpointing.read_position(checkpoint)
            if self.resumed is not None and self.resumed.step and self.config.sampling is None:
                raise UserError(
                    f"--resume {file_path} was taken in the middle of an epoch of named sources; give the --train-data and "
                    "sampling flags it was trained with"
                )
            if not self.args.train_data:
                return checkpoint
            now = self.entries.get(checkpointing.SETTINGS_ENTRY, {})
            warnings = checkpointing.compared_settings(checkpoint, now, self.resumed)
        if self.optimizer is None:
            warnings.append(
                f"--opt {self.args.opt} takes the settings of the checkpoint's optimizer: --wd, --beta1, --beta2, --eps "
                "and --momentum have no effect."
            )
        if checkpoint.get("epoch", 0) >= self.args.epochs:
            warnings.append(
                f"Nothing is left to train: {file_path} has all {self.args.epochs} epochs; a larger --epochs goes on."
            )
        for warning in warnings if self.args.rank == 0 else ():
            logging.warning(warning)
        return checkpoint

    def create_loss(self, args: argparse.Namespace) -> torch.nn.Module:
        """Make the loss of our step, where `own_step`."""
        return create_loss(self.config, args, self.model)

    def train_epoch(
        self,
        stock: Callable[[], None],
        model,
        data: dict,
        loss,
        epoch: int,
        optimizer,
        scaler,
        scheduler,
        tb_writer,
    ) -> None:
        """Train an epoch by our step, or by `stock()`, open_clip's own loop."""
        mark = optimizer.register_step_post_hook(self._stepped)
        try:
            if self.own_step:
                if self.trainer is None:
                    self.trainer = Trainer(
                        self.config, self.preemption, self.log, self.resumed, mixup=self.mixup, teacher=self.teacher,
                        entries=self.entries,
                    )  # fmt: skip
                self.trainer(
                    model, data, loss, epoch, optimizer, scaler, scheduler, self.args, tb_writer
                )
            else:
                stock()
            if self.config.active:
                require_finite(model, f"after epoch {epoch}")
        finally:
            mark.remove()

    def _stepped(self, *_: Any) -> None:
        self.trained = True

    def evaluate(
        self, stock: Callable[[dict], dict], model, data: dict, epoch: int, tb_writer, tokenizer
    ) -> dict:
        """Compute the metrics of an epoch.

        `stock(data)` gives open_clip's own.
        """
        from training.evaluate import evaluate as evaluate_epoch  # its rooms serve no other run

        return evaluate_epoch(
            self.config, self.args, self.log, self.inputs, self.transform, stock, model, data, epoch, tb_writer, tokenizer
        )  # fmt: skip

    def checkpoint_entry(self) -> dict[str, Any]:
        """Make the entries added to open_clip's epoch checkpoint: the model's config, and the position, for an exact resume."""
        end = self.trainer.epoch_end if self.trainer is not None else None
        return (
            self.entries if end is None else {**self.entries, "zerovl": checkpointing.entry_of(end)}
        )
