"""The stored teachers of a planned run: what their embeddings take on the disk, and how long `zerovl teacher` takes.

V views of each picture, D width of a teacher. Embeddings that exist are looked at; of those still to be made size and time are
counted from open_clip's names of the teachers (`--teacher-model`).
"""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass
from pathlib import Path

import open_clip
import torch
from open_clip.factory import get_model_config
from torch.utils.flop_counter import FlopCounterMode

from open_clip_zerovl.core.errors import UserError
from open_clip_zerovl.core.flags import flags_of
from open_clip_zerovl.data.names import field_names
from open_clip_zerovl.distill.manifest import read_manifest
from open_clip_zerovl.distill.shards import PREFIX, parse_widths
from open_clip_zerovl.distill.store import TeacherStore
from open_clip_zerovl.models.build import check_model
from open_clip_zerovl.models.configs import DEFAULT_CONTEXT_LENGTH, context_length_of
from open_clip_zerovl.plan.data import DataCheck, Missing
from open_clip_zerovl.plan.model import quiet
from open_clip_zerovl.plan.settings import PlanSettings
from open_clip_zerovl.recipe.flags import AllFlags
from open_clip_zerovl.recipe.host_waits import without_host_waits

BYTES_EACH = 2  # of a number of an embedding: float16 or bfloat16
# Flags of training that `zerovl teacher` has, too: what changes a picture's views, or which captions are embedded.
AS_IN_TRAINING = ("aug_cfg", "auto_augment", "image_interpolation", "pixel_path", "captions", "on_bad_sample")


@dataclass(frozen=True)
class TeacherPlan:
    """The teachers of a planned run.

    Attributes:
        place: folder of the embeddings, or "the shards".
        widths: D of each teacher; () where they are not known.
        models: names of teachers whose embeddings are still to be made.
        samples: that they will see; None where that is not known.
        views: V; None where the shards say.
        stored_bytes: of all embeddings; None in shards, or where nothing is known.
        made: whether the embeddings exist.
        flops: of `zerovl teacher` for all of them; None where they exist, or nothing is known.
        sample_bytes: of embeddings that are read for one sample of a step.
    """

    place: str
    widths: tuple[int, ...]
    models: tuple[str, ...] = ()
    samples: int | None = None
    views: int | None = None
    stored_bytes: int | None = None
    made: bool = True
    flops: float | None = None
    sample_bytes: int = 0


def check_teachers(settings: PlanSettings, data: DataCheck) -> TeacherPlan | None:
    """The run's teachers; what is broken of embeddings that exist goes into `data`. None without `--teacher`.

    Raises:
        UserError: widths that are none, or a name that open_clip does not know.
    """
    teacher = settings.teacher
    if teacher is None:
        return None
    if teacher.startswith(PREFIX):
        widths = parse_widths(teacher)
        return TeacherPlan("the shards", widths, sample_bytes=_read(settings, widths))
    folder = Path(teacher).expanduser()
    manifest = read_manifest(folder)
    if manifest is not None:
        widths = tuple(one["width"] for one in manifest.teachers)
        try:
            TeacherStore.open(folder)
        except UserError as error:
            what, _, advice = str(error).partition("; ")
            data.missing.append(Missing(what, advice))
        stored = manifest.bytes_of_embeddings
        return TeacherPlan(
            teacher, widths, views=manifest.views, stored_bytes=stored, sample_bytes=_read(settings, widths)
        )
    return _still_to_make(settings, data, folder)


def missing_teachers(settings: PlanSettings, place: str, image_size: int | tuple[int, int]) -> Missing:
    """Embeddings that are still to be made, with the whole `zerovl teacher` command that makes them for this run.

    Args:
        place: their folder.
        image_size: of the student, in pixels.
    """
    words = ["zerovl", "teacher", *(settings.teacher_model or ("MODEL",))]
    words += ["--train-data", settings.train_data or "NAME=SHARDS", "--out", place]
    words += ["--views", str(settings.teacher_views)]
    words += ["--image-size", str(image_size if isinstance(image_size, int) else max(image_size))]
    for each in flags_of(AllFlags):
        value = getattr(settings, each.name)
        if each.name not in AS_IN_TRAINING or value in (each.default, {}):
            continue
        several = value.items() if isinstance(value, dict) else ()
        words += [each.option, *([f"{key}={one}".replace(", ", ",") for key, one in several] or [value])]
    return Missing(f"teachers: {place} holds no embeddings", shlex.join(words))


def _still_to_make(settings: PlanSettings, data: DataCheck, folder: Path) -> TeacherPlan:
    with quiet():  # of weights that nobody needs
        costs = [forward_costs(name) for name in settings.teacher_model]
    if not costs:
        data.notes.append(
            "The teachers' disk, time and memory are not counted: name them, --teacher-model ViT-L-14 for each."
        )
        return TeacherPlan(str(folder), (), views=settings.teacher_views, made=False)
    pairs, views = data.pairs or settings.train_num_samples or 0, settings.teacher_views
    captions = pairs * max(1, len(field_names(settings.captions)))
    if field_names(settings.captions) or settings.captions is not None:
        data.notes.append("Of the teachers' embeddings one caption is counted for each field and picture.")
    widths = tuple(width for width, _, _ in costs)
    return TeacherPlan(
        str(folder),
        widths,
        models=settings.teacher_model,
        samples=pairs,
        views=views,
        stored_bytes=BYTES_EACH * sum(widths) * (pairs * views + captions),
        made=False,
        flops=sum(pairs * views * of_view + captions * of_caption for _, of_view, of_caption in costs),
        sample_bytes=_read(settings, widths),
    )


def _read(settings: PlanSettings, widths: tuple[int, ...]) -> int:
    """Bytes of embeddings that are read for one sample: of its view, and of each caption shown."""
    return BYTES_EACH * sum(widths) * (1 + settings.texts_per_image)


def forward_costs(name: str) -> tuple[int, float, float]:
    """(D, FLOPs of a picture, FLOPs of a caption) of an open_clip model, `NAME` or `NAME/TAG`, counted without its weights.

    Raises:
        UserError: a name that open_clip does not know.
    """
    architecture = name.partition("/")[0]
    if get_model_config(architecture) is None:
        check_model(architecture)
        raise UserError(f"--teacher-model {name} names no model of open_clip; a plan needs one, such as ViT-L-14")
    return _counted(architecture)


@functools.cache  # two teachers are often of one architecture
def _counted(architecture: str) -> tuple[int, float, float]:
    with torch.device("meta"):
        model = open_clip.create_model(
            architecture, device="meta", pretrained_text=False, pretrained_image=False
        ).eval()
    without_host_waits(model)  # what they read of a mask, tensors without values do not have
    side = model.visual.image_size
    height, width = (side, side) if isinstance(side, int) else side
    texts = torch.zeros(
        1, context_length_of(architecture, model) or DEFAULT_CONTEXT_LENGTH, dtype=torch.long, device="meta"
    )
    counted = []
    with torch.no_grad():
        for encode, inputs in (
            (model.encode_image, torch.empty(1, 3, height, width, device="meta")),
            (model.encode_text, texts),
        ):
            counter = FlopCounterMode(display=False)
            with counter:
                features = encode(inputs)
            counted.append(float(counter.get_total_flops()))
    return features.shape[-1], counted[0], counted[1]
