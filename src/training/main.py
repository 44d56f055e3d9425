"""`python -m training.main`: open_clip_train's program with the recipe's flags.

User errors are found before open_clip's main starts, because that main first makes a run folder (and then refuses to reuse its
name), and ends several errors with exit code 0.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from training.early import answer

    if (early_status := answer(sys.argv[1:])) is not None:
        sys.exit(early_status)

import argparse
import logging
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import open_clip
import open_clip_train.main as host
import torch
from open_clip_train.distributed import world_info_from_env

from open_clip_zerovl.core.errors import UserError, first_line
from open_clip_zerovl.core.processes import PREEMPTED_STATUS, REQUEUE_MARKER
from open_clip_zerovl.data.loader import MixtureLoader
from open_clip_zerovl.data.transforms import paper_transform_of
from open_clip_zerovl.models.build import check_model, create_model_and_transforms, with_text_model
from open_clip_zerovl.models.local_dir import no_code_from_data
from open_clip_zerovl.recipe.frozen_cache import FrozenCache
from open_clip_zerovl.recipe.mixup import CoinFlipMixup
from training import (
    checkpointing,
    codebase,
    data,
    device,
    early,
    ending,
    evaluate,
    model,
    preemption,
    resume,
    schedule,
    train,
)
from training.config import RecipeConfig, uses_own_step
from training.console import Console
from training.journal import Journal
from training.lock import LOCK, RunLock
from training.params import parse
from training.pieces import Pieces
from training.seams import check_host, replaced

# How torch begins when an optimizer loads a state with groups of other sizes.
OTHER_GROUPS = "loaded state dict"


def main(argv: Sequence[str] | None = None) -> int:
    """Run training (or evaluation) and return the exit status.

    0          done
    2          an error, with one sentence on standard error
    85         stopped by SIGTERM or SIGUSR1 with a step checkpoint and a marker for the launcher (torchrun turns it into 1)
    130        stopped by Ctrl-C with a step checkpoint
    143, 130   the same with `--logs none`, without a checkpoint
    """
    # Loader workers are forked after the tokenizer was used. Its threads are not forked, and a worker would wait for them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _, rank, world_size = world_info_from_env()
    console, run = Console(), None
    try:
        line = check_host()
        if rank == 0 and (warning := line.LINE.untested(open_clip.__version__)) is not None:
            logging.warning(f"{warning[0].upper()}{warning[1:]}.")
        args, config = parse(sys.argv[1:] if argv is None else argv)
        if config.active and not (config.verbose or args.debug):
            console.shorten(rank, weights_follow=bool(args.resume or config.init_from))
        run = Run(args, config, line, console)
        run.check(rank)
        run.open(rank)
        run.start()
    except UserError as error:
        where = f"[rank {rank}] " if world_size > 1 else ""
        console.progress.end()
        ending.say(f"{where}training.main: error: {error}")
        return 2
    except preemption.Stopped as stopped:
        assert run is not None
        return run.stopped(stopped, rank)
    finally:
        console.close()
        if run is not None:
            run.close()
    return 0


class Run:
    """One run of open_clip's main with our pieces in the seams of the installed open_clip's line."""

    def __init__(self, args: argparse.Namespace, config: RecipeConfig, line: Any, console: Console) -> None:
        self.journal = Journal(args, config, console)
        self.args, self.config, self.line = args, config, line
        self.resumes_latest = args.resume == "latest"
        self.own_step = uses_own_step(config, args)
        self.preemption = preemption.Preemption()
        self._handlers = ExitStack()
        # set by `open`
        self.model_name = args.model
        self.inputs = data.Inputs()
        self.lock: RunLock | None = None
        self.fresh = False  # whether the run's folder was empty before
        # set by the seams, in main's order
        self.model: torch.nn.Module | None = None
        self.mixup: CoinFlipMixup | None = None
        self.resumed: resume.Position | None = None
        self.cache: FrozenCache | None = None
        self.trainer: train.Trainer | None = None
        self.trained = False

    def check(self, rank: int) -> None:
        """Check the command line; nothing is opened, registered or deleted.

        Raises:
            UserError: the first error.
        """
        args, config = self.args, self.config
        early.check_run(args, config, rank=rank)
        device.check_device(args)
        model.check_optimizer(args)
        check_model(args.model, text_model=config.text_model, pretrained_image=args.pretrained_image)

    def open(self, rank: int) -> None:
        """Open the data, register the model config of `--text-model`, and prepare the run's folder.

        The first rank locks the folder, and deletes the marker of an earlier stop and half-written files of killed processes.

        Raises:
            UserError: data that cannot be used, or another process that trains a run of this name.
        """
        args, config = self.args, self.config
        device.settle_device(args, recipe=config.active)
        if config.text_model is not None:
            self.model_name = with_text_model(args.model, config.text_model)
        self.inputs = data.open_inputs(config, args)
        if rank != 0 or args.name is None:
            return
        folder = Path(self._folder())
        self.lock = RunLock(folder)
        self.lock.acquire()
        early.require_new_name(
            args, resumes_latest=self.resumes_latest
        )  # it may have been taken while this process waited
        self.fresh = [path.name for path in folder.iterdir()] == [LOCK]
        (folder / REQUEUE_MARKER).unlink(missing_ok=True)
        checkpointing.remove_leftovers(folder / "checkpoints")

    def start(self) -> None:
        """Run open_clip's main. A run that ends before its first step removes its folder, which would block its name.

        Raises:
            UserError: the run cannot go on.
        """
        try:
            with (
                replaced(self.line.filled(self._pieces(), host), self._epoch_entry),
                no_code_from_data(),
                ExitStack() as self._handlers,
            ):
                try:
                    status = host.main([])  # parse_args is a seam: the arguments are parsed already
                    if status in (None, 0):
                        self.journal.end("done")
                except preemption.Stopped as stopped:
                    if self.args.rank == 0:
                        self.journal.end("stopped", f"Step {stopped.step} of epoch {stopped.epoch} was the last.")
                        self._leave(stopped)
                    self.preemption.wait_for_all()
                    raise
                except ValueError as error:
                    if not str(error).startswith(OTHER_GROUPS):
                        raise
                    raise UserError(
                        f"--resume {self.args.resume} has an optimizer's state for other groups of parameters than this run: "
                        "--opt, --lock-*, --freeze or --no-embedding-decay are not as they were, or another line of open_clip "
                        "wrote it; give them as they were, or start a new run with --init-from"
                    ) from error
            if status not in (None, 0):
                raise UserError(f"open_clip's main gave up with status {status}; its message is above")
        except BaseException as error:  # also for an interrupt or a defect
            if self.trained and not isinstance(error, preemption.Stopped | KeyboardInterrupt):
                self.journal.end("failed", first_line(error))
            if self.fresh and not self.trained:
                logging.shutdown()
                shutil.rmtree(self._folder(), ignore_errors=True)
            raise
        finally:
            # open_clip sets every logger to INFO, and dynamo then prints its compile statistics when the process ends.
            for name in list(logging.root.manager.loggerDict):
                if name.startswith("torch."):
                    logging.getLogger(name).setLevel(logging.WARNING)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def close(self) -> None:
        """Release the run's folder."""
        if self.lock is not None:
            self.lock.release()

    def _leave(self, stopped: preemption.Stopped) -> None:
        """On the first rank of a stopped run: write the launcher's marker, and sync to the remote store for the last time."""
        if not stopped.saved:
            return
        if stopped.asked == preemption.PREEMPTED:
            preemption.mark_requeue(self.args)
        if self.args.remote_sync is not None:
            ending.end_children()  # ends the process that syncs periodically
            host.remote_sync(
                self._folder(), os.path.join(self.args.remote_sync, self.args.name), self.args.remote_sync_protocol
            )

    def stopped(self, stop: preemption.Stopped, rank: int) -> int:
        """Print how to resume a stopped run, and return its exit status."""
        interrupted = stop.asked == preemption.INTERRUPTED
        if not stop.saved:
            status = ending.INTERRUPTED_STATUS if interrupted else 128 + signal.SIGTERM
            words = f"stopped after step {stop.step} of epoch {stop.epoch}; nothing is saved: --logs {self.args.logs}"
        else:
            status = ending.INTERRUPTED_STATUS if interrupted else PREEMPTED_STATUS
            words = (
                f"stopped; step {stop.step} of epoch {stop.epoch} is saved. The same command goes on from there with --name "
                f"{self.args.name} --resume latest"
            )
            if not interrupted:
                words += f"; left {os.path.join(self._folder(), REQUEUE_MARKER)} for the launcher"
        if rank == 0:
            ending.say(f"training.main: {words}.")
        return status

    def _folder(self) -> str:
        return os.path.join(self.args.logs, self.args.name)

    def _pieces(self) -> Pieces:
        args, config = self.args, self.config
        return Pieces(
            args=args,
            copy_codebase=codebase.copy_of_run,
            create_model=self._create_model,
            model_name=self.model_name,
            get_data=self._get_data,
            load_checkpoint=self._load_checkpoint,
            newest_checkpoint=checkpointing.newest_whole,
            train_epoch=self._train_epoch,
            own_step=self.own_step,
            create_loss=partial(train.create_loss, config),
            cosine_lr=partial(schedule.cosine_lr, lr_min=config.lr_min or 0.0, warmup_share=config.warmup_share)
            if config.lr_min is not None or config.warmup_share is not None
            else None,
            create_adamw=self._create_adamw if config.no_embedding_decay else None,
            evaluate=partial(evaluate.evaluate, config, args, self.journal) if config.retrieval_data else None,
        )

    def _create_model(self, model_name: str, pretrained: str | None = None, **options: Any):
        if self.lock is None and self.args.rank == 0 and self.args.name is not None:
            # Without --name, main has made one up; a run that is started in the same second gets the same.
            self.lock = RunLock(Path(self._folder()))
            self.lock.acquire()
        if self.model is not None:  # main makes the teacher after it: --distill-model
            return create_model_and_transforms(model_name, pretrained, **options)
        # Only with our data: open_clip's cannot go on in the middle of an epoch, so a step checkpoint would be of no use.
        if self.own_step and self.config.sampling is not None:
            # Not before all ranks have met: a rank that waits for one that has failed must still end by SIGTERM.
            self._handlers.enter_context(self.preemption)
        else:
            preemption.end_by_signals()
        created = model.create_model(self.config, self.args, self.model_name, pretrained, **options)
        self.model, transform_train, transform_eval, self.mixup = created
        if self.config.active and self.args.rank == 0 and self.args.train_data and self.args.logs.lower() != "none":
            checkpointing.require_room(self._folder(), self.model)
        return self.model, transform_train, transform_eval

    def _create_adamw(self, **options: Any) -> torch.optim.Optimizer:
        assert self.model is not None  # main makes the optimizer after it
        return model.create_adamw(self.model, self.args.wd, **options)

    def _get_data(
        self,
        stock: Callable[[argparse.Namespace], dict],
        args: argparse.Namespace,
        preprocess_fns,
        epoch: int,
        tokenizer,
    ) -> dict:
        def paper_transform() -> Callable[..., Any]:
            assert self.model is not None  # main makes the data after it
            return paper_transform_of(self.model.visual)

        found = data.get_data(self.config, self.inputs, stock, args, preprocess_fns, tokenizer, paper_transform)
        if self.config.cache_frozen is not None and self.own_step:
            assert self.model is not None
            self.cache = data.frozen_cache(
                self.config,
                self.inputs.sources,
                args,
                self.model,
                open_clip.get_model_config(self.model_name)["embed_dim"],
                preprocess_fns[0],
                tokenizer,
            )
        return found

    def _load_checkpoint(self, file_path: str, map_location: Any = None) -> dict:
        assert self.model is not None  # main loads a checkpoint after it has made the model
        file_path = self._undamaged(file_path)
        checkpoint = resume.load_checkpoint(self.model, self.args, file_path, map_location)
        position = resume.read_position(checkpoint)
        if position is not None and position.step and (not self.own_step or self.config.sampling is None):
            raise UserError(
                f"--resume {file_path} was taken in the middle of an epoch of named sources; give the --train-data and "
                "sampling flags it was trained with"
            )
        self.resumed = position
        return checkpoint

    def _undamaged(self, file_path: str) -> str:
        """The checkpoint to resume from; if epoch_latest.pt is damaged, the newest whole one beside it.

        Raises:
            UserError: it is damaged, and there is no other.
        """
        path = Path(file_path)
        searched = self.resumes_latest and not self.args.save_most_recent  # `newest_whole` has read it already
        damage = None if searched or not checkpointing.is_archive(path) else checkpointing.damage_of(path)
        if damage is None:
            return file_path
        other = checkpointing.newest_whole(str(path.parent)) if self.resumes_latest else None
        if other is None:
            raise UserError(f"--resume {file_path} cannot be read as a checkpoint: the file {damage}; give a whole one")
        logging.warning(f"The file {file_path} {damage}; going on from {other}.")
        return other

    def _train_epoch(
        self, stock: Callable[[], None], model, data: dict, loss, epoch: int, optimizer, scaler, scheduler, tb_writer
    ) -> None:
        mark = optimizer.register_step_post_hook(self._stepped)
        try:
            if self.own_step:
                if self.trainer is None:
                    inputs = train.TrainerInputs(
                        self.config, self.preemption, self.resumed, self.mixup, self.cache, self.journal
                    )
                    self.trainer = train.Trainer(inputs)
                self.trainer(model, data, loss, epoch, optimizer, scaler, scheduler, self.args, tb_writer)
            else:
                stock()
        except RuntimeError as error:
            # torch raises an error about a lost loader worker at any place in the process
            loader = getattr(data["train"].dataloader, "unwrapped", data["train"].dataloader)
            sentence = loader.explain(error) if isinstance(loader, MixtureLoader) else None
            if sentence is None:
                raise
            loader.abandon()
            raise UserError(sentence) from error
        finally:
            mark.remove()

    def _epoch_entry(self) -> dict[str, Any]:
        """The further entry of open_clip's epoch checkpoint, with which a resumed run is bit-equal."""
        end = self.trainer.epoch_end if self.trainer is not None else None
        return {} if end is None else {"zerovl": resume.entry_of(end)}

    def _stepped(self, *_: Any) -> None:
        self.trained = True


def run_as_program() -> NoReturn:
    """`main` as a process, which ends with all that it has started (`ending.end`)."""
    ending.run(main)


if __name__ == "__main__":
    run_as_program()
