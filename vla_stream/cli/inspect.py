"""`vla-stream inspect`: entries of a stream, decoded for people, and the camera images that they carry or refer to."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from vla_stream.cli.options import Target, connected, target_options
from vla_stream.errors import BadMessage, InputError, PayloadUnreachable, RunFailed

if TYPE_CHECKING:
    from PIL.Image import Image

    from vla_stream.broker.connection import Client
    from vla_stream.broker.queue import Entry
    from vla_stream.environments.protocol import Observations
    from vla_stream.streams.keys import Keys

STREAMS = (
    "obs-requests",
    "actions:SIMULATOR",
    "trajectories",
    "weights",
    "events",
    "dead-letters",
    "metrics",
    "trace",
    "control",
)
WITH_IMAGES = ("obs-requests", "trajectories")
BLOCK_MS = 1000
IMAGE_DEADLINE_S = 20.0  # an observation lives for some ms only: the next one that can be opened is taken
SHOWN_CHARACTERS, SHOWN_FIELDS = 160, 200
SMALLEST_TILE = 144  # smaller images are enlarged by a whole factor, so that a person sees something
LABEL_HEIGHT = 14


@click.command()
@click.argument("stream", metavar="STREAM")
@target_options
@click.option("--follow", "-f", is_flag=True, help="Go on with new entries as they come.")
@click.option("--count", type=click.IntRange(min=1), default=3, show_default=True, help="Newest entries to show first.")
@click.option(
    "--image",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Save the camera images of one entry of obs-requests or trajectories as a PNG: a line per row.",
)
def inspect(stream: str, target: Target, follow: bool, count: int, image: Path | None) -> None:
    """Show entries of STREAM: obs-requests, actions:SIMULATOR, trajectories, weights, events, dead-letters, metrics,
    trace, control. Looking takes nothing from the workers.
    """
    from vla_stream.broker.tail import Tail, newest_entries
    from vla_stream.streams.keys import Keys

    keys = Keys(target.run)
    key = key_of(keys, stream)
    if image is not None and stream not in WITH_IMAGES:
        raise InputError(f"--image: {stream} carries no images, expected {' or '.join(WITH_IMAGES)}")
    with connected(target.url, block_s=BLOCK_MS / 1000) as client:
        if image is not None:
            _save_image(client, keys, target, stream, image)
            return
        shown = newest_entries(client, key, count)
        if not shown and not follow:
            click.echo(
                f"{stream} of run {target.run} is empty at this moment; wait for entries with --follow", err=True
            )
        tail = Tail(client, key, shown[-1].id if shown else "$")
        while True:
            for entry in shown:
                click.echo(describe(stream, entry))
            if not follow:
                return
            shown = tail.read(100, BLOCK_MS)


def key_of(keys: Keys, stream: str) -> str:
    """The key of a stream by the name that people use. Raises InputError."""
    kind, _, simulator = stream.partition(":")
    if kind == "actions" and simulator:
        return keys.actions(simulator)
    known = {
        "obs-requests": keys.obs_requests,
        "trajectories": keys.trajectories,
        "weights": keys.weights,
        "events": keys.events,
        "dead-letters": keys.dead_letters,
        "metrics": keys.metrics,
        "trace": keys.trace,
        "control": keys.control,
    }
    if stream not in known:
        raise InputError(f"stream {stream!r}: unknown, expected {', '.join(STREAMS)}")
    return known[stream]


def describe(stream: str, entry: Entry) -> str:
    """An entry over a few lines: its id and age, its short fields, and what its arrays hold."""
    age_s = time.time() - entry.born_ms / 1000
    lines = [f"{entry.id}  ({time.strftime('%H:%M:%S', time.localtime(entry.born_ms / 1000))}, {age_s:.1f} s ago)"]
    lines += [f"    {name}  {value}" for name, value in short_fields(entry.fields).items()]
    decoder = DECODERS.get(stream.partition(":")[0])
    if decoder is not None:
        try:
            lines += [f"    {line}" for line in decoder(entry)]
        except BadMessage as exc:
            lines.append(f"    does not decode: {exc}")
    return "\n".join(lines)


def short_fields(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    """Fields as texts, long or binary ones by their size."""
    from vla_stream.streams.notices import one_line

    shown = {}
    for name, raw in list(fields.items())[:SHOWN_FIELDS]:
        text = raw.decode(errors="replace")
        readable = text.isprintable() and len(raw) <= SHOWN_CHARACTERS
        shown[one_line(name)[:SHOWN_CHARACTERS]] = text if readable else f"({len(raw)} bytes)"
    return shown


def _describe_request(entry: Entry) -> list[str]:
    from vla_stream.streams.obs_requests import ObsRequest
    from vla_stream.streams.observations import unpack_observations

    request = ObsRequest.from_fields(entry.fields)
    if request.payload is None:
        return []
    return _describe_observations(unpack_observations(request.payload, request.n))


def _describe_observations(observations: Observations) -> list[str]:
    lines = [f"image.{camera}: {_array(image)}" for camera, image in observations.images.items()]
    lines.append(f"state: {_array(observations.state)}")
    return [*lines, f"instruction: {json.dumps(sorted(set(observations.instruction)))}"]


def _describe_reply(entry: Entry) -> list[str]:
    from vla_stream.streams.actions import ActionReply

    act = ActionReply.from_fields(entry.fields).act
    if act is None:
        return []
    named: dict[str, np.ndarray] = {
        "actions": act.actions,
        "logprobs": act.logprobs,
        "values": act.values,
        **act.extras,
    }
    return [f"{name}: {_array(array)}" for name, array in named.items()]


def _describe_trajectory(entry: Entry) -> list[str]:
    from vla_stream.streams.trajectories import ARRAYS, Trajectory

    trajectory = Trajectory.from_fields(entry.fields)
    lines = [f"{name}: {_array(getattr(trajectory.segment, name))}" for name in ARRAYS]
    places = [item if isinstance(item, str) else f"({len(item)} bytes)" for item in trajectory.payloads]
    lines.append(f"observations: {len(places)} packets, first {places[0]}")
    ended = [f"{'success' if e.success else 'failure'} after {e.steps} steps" for e in trajectory.episodes[:8]]
    return [*lines, f"episodes that ended: {', '.join(ended) or 'none'}"]


def _describe_letter(entry: Entry) -> list[str]:
    from vla_stream.streams.notices import one_line

    return [
        f"{one_line(name)[:SHOWN_CHARACTERS]} = {raw[:60]!r}"
        for name, raw in list(entry.fields.items())[:SHOWN_FIELDS]
        if name[:4] == b"raw."
    ]


DECODERS: Mapping[str, Callable[[Any], list[str]]] = {
    "obs-requests": _describe_request,
    "actions": _describe_reply,
    "trajectories": _describe_trajectory,
    "dead-letters": _describe_letter,
}


def _array(array: np.ndarray) -> str:
    """`float32[8, 4, 3] from -0.9 to 1`."""
    shape = f"{array.dtype}{list(array.shape)}"
    if array.size == 0:
        return shape
    if array.dtype == bool:
        return f"{shape}, {int(array.sum())} of {array.size} true"
    return f"{shape} from {array.min():.4g} to {array.max():.4g}"


# ---- images


def _save_image(client: Client, keys: Keys, target: Target, stream: str, file: Path) -> None:
    """The images of the newest entry that can be opened, or of the next one to come."""
    from vla_stream.broker.lanes import PayloadReader
    from vla_stream.broker.tail import Tail, newest_entries
    from vla_stream.flow import Flow

    key = key_of(keys, stream)
    reader = PayloadReader(client, keys.blob, Flow(client, keys).shm_folder())
    entries = newest_entries(client, key, 5)
    tail = Tail(client, key, entries[-1].id if entries else "0")
    deadline_s = time.monotonic() + IMAGE_DEADLINE_S
    reason = "no entry came"
    while True:
        for entry in reversed(entries):
            try:
                moments = _moments(stream, entry, reader.read)
                picture = contact_sheet(moments)
            except (BadMessage, PayloadUnreachable) as exc:
                reason = str(exc)
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file)
            rows = len(moments[0])
            click.echo(
                f"{entry.id} of {stream}: {rows} rows, {len(moments)} moments, {picture.size[0]}×{picture.size[1]}"
            )
            for row in range(rows):
                click.echo(f"    row {row}: {_instructions(moments, row)}")
            click.echo(f"saved {file}")
            return
        if time.monotonic() > deadline_s:
            raise RunFailed(f"{stream}: no image could be read for {IMAGE_DEADLINE_S:g} s, last reason: {reason}")
        entries = tail.read(20, BLOCK_MS)


def _moments(stream: str, entry: Entry, read: Callable[[str], bytes | memoryview]) -> list[Observations]:
    """The observations that an entry carries, in time. Raises BadMessage or PayloadUnreachable."""
    if stream == "obs-requests":
        from vla_stream.streams.obs_requests import ObsRequest
        from vla_stream.streams.observations import unpack_observations

        request = ObsRequest.from_fields(entry.fields)
        return [unpack_observations(read(request.ref) if request.payload is None else request.payload, request.n)]
    from vla_stream.streams.trajectories import Trajectory

    return list(Trajectory.from_fields(entry.fields).load(read).observations)


def _instructions(moments: list[Observations], row: int) -> str:
    """What the row was told, in time: after a reset it may be something else."""
    told = [moment.instruction[row] for moment in moments]
    return " > ".join(word for index, word in enumerate(told) if index == 0 or word != told[index - 1])


def contact_sheet(moments: list[Observations], labels: list[str] | None = None) -> Image:
    """One line per row, labelled with its instruction; in it all cameras side by side, for each moment in turn."""
    from PIL import Image, ImageDraw

    lines = []
    for row in range(len(moments[0])):
        images = [image[row] for moment in moments for image in moment.images.values()]
        if not images:
            raise BadMessage("the observations have no camera")
        scale = max(1, -(-SMALLEST_TILE // max(image.shape[0] for image in images))) if len(moments) == 1 else 1
        tiles = [image.repeat(scale, axis=0).repeat(scale, axis=1) for image in images]
        height = max(tile.shape[0] for tile in tiles)
        lines.append(np.concatenate([np.pad(t, ((0, height - len(t)), (0, 2), (0, 0))) for t in tiles], axis=1))
    labels = labels or [f"{row}: {_instructions(moments, row)}" for row in range(len(lines))]
    pen = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    width = max(*(line.shape[1] for line in lines), *(4 + int(pen.textlength(label)) for label in labels))
    sheet = Image.new("RGB", (width, sum(len(line) + LABEL_HEIGHT for line in lines)))
    pen = ImageDraw.Draw(sheet)
    top = 0
    for label, line in zip(labels, lines, strict=True):
        pen.text((2, top), label, fill=(255, 255, 255))
        sheet.paste(Image.fromarray(line), (0, top + LABEL_HEIGHT))
        top += len(line) + LABEL_HEIGHT
    return sheet
