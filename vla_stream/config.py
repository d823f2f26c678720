"""The config of a run: typed, documented, and closed (an unknown key is an error that names the nearest known one).

Several YAML files compose left to right, `--set a.b=c` comes last. `load()` is the only entrance.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError

from vla_stream import tasks
from vla_stream.algorithm import Algorithm as Algorithm
from vla_stream.errors import InputError
from vla_stream.pretrain import MAX_SEED as MAX_SEED
from vla_stream.pretrain import Pretrain as Pretrain
from vla_stream.sections import Count, Decay, Milliseconds, PlainPath, Seconds
from vla_stream.sections import Section as Section

UNKNOWN_KEY = "extra_forbidden"  # pydantic's name of the error
MAX_NUMBER = 10**12  # of updates, versions, tickets: Lua's tostring writes 1e+14 for what has more than 14 digits

EVALUATION = ".eval"  # after a run's name: that of its evaluations
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}(\.eval(-[0-9]{1,4})?)?$"
TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]
MOST_TASKS = 100  # each has a few figures in every update's sample
LONGEST_ROUND = 1000  # tickets after which the tasks' order repeats

CHECKPOINTS, DEMONSTRATIONS = "checkpoints", "demos.safetensors"  # names in runs/<name>/

Model = TypeVar("Model", bound=BaseModel)


class Task(Section):
    weight: int = Field(default=1, ge=1, le=1000, description="Part of the trained segments, of all tasks' weights.")
    batches: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Environment batches for each of a task with 1: more where it is slow.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="On top of environment.options.")


class Environment(Section):
    name: str = Field(description="Entry point of the group vla_stream.environments, or module:Class.")
    max_steps: Count = Field(ge=1, description="Environment steps after which an episode is truncated.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of that environment; see its file.")
    tasks: dict[TaskName, Task] = Field(
        default_factory=dict, description="Several tasks in one run, by names of one's own. Default: one."
    )

    def only(self, task: str) -> Environment:
        """As if this task were the only one."""
        options = copy.deepcopy(self.options)
        _merge(options, self.tasks[task].options)
        return self.model_copy(update={"options": options, "tasks": {}})


class Policy(Section):
    name: str = Field(description="Entry point of the group vla_stream.policies, or module:Class.")
    chunk: Count = Field(ge=1, description="H: actions per chunk, executed one after the other without looking again.")
    init_from: PlainPath | None = Field(
        default=None, description="Checkpoint folder to start from; takes the place of `pretrain`."
    )
    python: PlainPath | None = Field(
        default=None,
        description="Interpreter that has what the policy needs, for example .venvs/lerobot/bin/python: that of "
        "generators, trainer and eval. Default: this one.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of that policy; see its file.")


class Steps(Section):
    steps: Count = Field(
        ge=1, description="T: chunk steps per segment; rows that end are reset at the next chunk step."
    )


def _segment_kind(value: object) -> str | None:
    """Which of the two forms is meant, so that a mistake in one is not told in terms of both; None: neither."""
    if isinstance(value, Mapping | Steps):
        return "Steps"
    return "literal['episode']" if value == "episode" else None


SegmentKind = Annotated[
    Annotated[Literal["episode"], Tag("literal['episode']")] | Annotated[Steps, Tag("Steps")],
    Discriminator(
        _segment_kind,
        custom_error_type="segment_kind",
        custom_error_message="episode, or the number of chunk steps, for example {steps: 16}",
    ),
]


class Simulators(Section):
    count: Count = Field(default=2, ge=0, description="Simulator processes that `run` starts.")
    python: PlainPath | None = Field(
        default=None,
        description="Interpreter that has the simulator, for example .venvs/libero/bin/python. Default: this one.",
    )
    env_batches: Count = Field(default=1, ge=1, description="Independent environment batches per process.")
    slots: Count = Field(default=2, ge=1, description="Parts of a batch that travel alone: one request per chunk step.")
    envs_per_slot: Count = Field(default=8, ge=1, description="k: rows (environments) of one slot.")
    segment: SegmentKind = Field(
        default=Steps(steps=16), description="{steps: T}, or `episode`: k rows of one task and seed, without resets."
    )
    step_deadline_s: Seconds = Field(default=30.0, gt=0, description="A step that takes longer is a hang: replace it.")
    start_deadline_s: Seconds = Field(
        default=120.0, gt=0, description="The same for making and resetting environments."
    )


class Generators(Section):
    count: Count = Field(default=1, ge=0, description="Generator processes that `run` starts.")
    batching: str = Field(
        default="deadline",
        max_length=200,
        description="deadline: wait up to max_wait_ms for a full batch; work_conserving: never wait; auto: never wait, "
        "and take a fair share of what waits; or module:Class, see batching.py.",
    )
    max_batch_size: Count = Field(default=32, ge=1, description="Rows that one inference may hold at most.")
    max_wait_ms: Milliseconds = Field(
        default=5.0, ge=0, description="Age of the oldest request at which a batch is sent; batching: deadline only."
    )
    padded_sizes: list[Annotated[Count, Field(ge=1)]] = Field(
        default_factory=list, description="Batch sizes in rows to pad to; max_batch_size is always one of them."
    )
    device: str = Field(default="auto", description="Torch device, or auto: cuda if there is one, else cpu.")
    threads: Count = Field(default=1, ge=1, description="CPU threads of torch in each generator.")
    batch_deadline_s: Seconds = Field(
        default=60.0, gt=0, description="A batch older than this counts as hung: restart."
    )


class Trainer(Section):
    segments_per_update: Count = Field(ge=1, description="B: segments that one update consumes.")
    update: Literal["buffered", "streaming"] = Field(
        default="buffered", description="streaming: each segment is trained once, when it arrives."
    )
    epochs: Count = Field(default=3, ge=1, description="Passes over the segments of one update; streaming: 1.")
    minibatch_samples: Count = Field(
        default=256, ge=1, description="Chunk steps (of one row) per optimiser step; streaming: per pass."
    )
    optimiser_steps: Count = Field(
        default=1,
        ge=1,
        description="Streaming: steps per update, each with an equal share of its segments; with 1 nothing is clipped.",
    )
    learning_rate: float = Field(default=2.5e-4, ge=0, description="Adam's learning rate of the policy.")
    value_learning_rate: float | None = Field(
        default=None, ge=0, description="Adam's learning rate of the value head. Default: 2.5e-4."
    )
    learning_rate_decay: Decay | None = Field(
        default=None, description="How both fall, for example {to: 0.1, at_update: 60}. Default: they stay."
    )
    max_grad_norm: float = Field(default=0.5, gt=0, description="Gradients are scaled down to this norm.")
    critic_warmup_updates: Count | None = Field(
        default=None, ge=0, description="First updates that train only the value head; versions advance. Default: 3."
    )
    prefetch_segments: Count = Field(
        default=4, ge=0, description="Segments of the next update to read while this one computes; order: arrival only."
    )
    max_skipped_in_a_row: Count = Field(default=5, ge=1, description="Skipped updates in a row that end the run.")
    checkpoint_every: Count = Field(default=20, ge=1, description="Updates between checkpoints.")
    ack: Literal["update", "checkpoint"] = Field(
        default="update", description="checkpoint: segments are kept until a checkpoint holds what they taught."
    )
    keep_checkpoints: Count = Field(default=3, ge=1, description="Newest checkpoints kept on disk.")
    record_every: Count = Field(
        default=0, ge=0, description="Every so many updates one is recorded with all its segments, for replay; 0: none."
    )
    keep_records: Count = Field(default=3, ge=1, description="Newest recorded updates kept on disk.")
    weights_base_every: int = Field(
        default=20, ge=1, le=32, description="Of so many versions one is published full, the others as changes; 1: all."
    )
    device: str = Field(
        default="auto",
        description="Torch device, or auto: cuda if there is one, else cpu. With several ranks cuda is one for each.",
    )
    threads: Count = Field(default=1, ge=1, description="CPU threads of torch in the trainer.")
    ranks: Count = Field(default=1, ge=1, description="Processes that train together, each an equal part of B.")
    parallel: Literal["ddp", "fsdp"] = Field(
        default="ddp",
        description="Of several ranks. ddp: each has all weights; fsdp: a part, for policies too large for one device.",
    )
    rank_deadline_s: Seconds = Field(
        default=120.0, gt=0, description="A rank that others wait for longer counts as hung: all start again."
    )

    @property
    def critic_learning_rate(self) -> float:
        """`value_learning_rate`, with its default. Both are None by default so that one that is set where there is no
        critic can be told."""
        return 2.5e-4 if self.value_learning_rate is None else self.value_learning_rate

    @property
    def warmup_updates(self) -> int:
        """`critic_warmup_updates`, with its default."""
        return 3 if self.critic_warmup_updates is None else self.critic_warmup_updates


class Flow(Section):
    max_staleness: Count = Field(default=1, ge=0, description="η: versions that a segment's oldest weights may lag.")
    stale_limit: Count | None = Field(
        default=None, ge=0, description="Staleness above which a segment is refused. Default: 2η + 2; by ticket η."
    )
    order: Literal["arrival", "ticket"] = Field(
        default="arrival", description="ticket: trained in ticket order, staleness exact; for parity runs."
    )
    lease_s: Seconds = Field(
        default=10.0, ge=0.01, description="A dead worker's permits and requests return after this."
    )
    reply_deadline_s: Seconds = Field(default=60.0, gt=0, description="A slot asks again after waiting this long.")
    drain_deadline_s: Seconds = Field(default=30.0, gt=0, description="Time that drained workers have to finish.")

    @property
    def stale_limit_versions(self) -> int:
        """In ticket order η is exact: only a trainer that takes over, with a version of its own, makes one staler."""
        if self.order == "ticket":
            return self.max_staleness
        return 2 * self.max_staleness + 2 if self.stale_limit is None else self.stale_limit


LaneName = Literal["auto", "inline", "shm", "redis"]


class Broker(Section):
    lane: LaneName = Field(
        default="auto", description="Way of the observation bytes; auto: inline if small, shm on one host, else redis."
    )
    inline_below_bytes: Count = Field(default=32768, ge=0, description="Observations smaller than this travel inline.")


class Evaluation(Section):
    episodes: Count = Field(default=200, ge=0, description="Held-out episodes of each evaluation; 0: none.")
    seed: int = Field(
        default=10_000_000, ge=0, le=MAX_SEED, description="First reset seed; training seeds never meet these."
    )
    every: Count = Field(
        default=0,
        ge=0,
        description="Updates between evaluations beside the run, which then choose its best checkpoint; 0: before and "
        "after it only.",
    )
    simulators: Count = Field(default=1, ge=1, description="Simulator processes of an evaluation beside a run.")
    generators: Count = Field(default=1, ge=1, description="Generator processes of an evaluation beside a run.")


class HeldOut(Section):
    """Of the config of an evaluation's own run, which `vla-stream eval` makes of another one's: episodes are played on
    held-out seeds, and nothing is learned."""

    sample: bool = Field(default=False, description="Sample actions as in training; else the most likely ones.")
    replace: dict[str, str] = Field(default_factory=dict, description="Words that the policy reads in others' place.")


class Allocation(Section):
    """Other numbers of the workers that `run` started, in mid-run, as `vla-stream scale` changes them by hand.

    The rule stands in cli/allocation.py."""

    most_simulators: Count = Field(ge=1, description="Simulators at most.")
    most_generators: Count = Field(ge=1, description="Generators at most.")
    least_simulators: Count = Field(default=1, ge=1, description="Simulators at least.")
    least_generators: Count = Field(default=1, ge=1, description="Generators at least.")
    together: Count | None = Field(
        default=None,
        ge=2,
        description="Both together at most, where each takes a device: what one gets is taken from the other.",
    )


class Tracking(Section):
    tensorboard: bool = Field(default=False, description="Event files for TensorBoard in runs/<name>/tensorboard.")
    wandb: str | None = Field(default=None, min_length=1, description="Project at Weights & Biases.")
    prometheus_port: int | None = Field(
        default=None, ge=1, le=65535, description="Port on loopback at which Prometheus finds the metrics."
    )


class Config(Section):
    name: str = Field(default="demo", pattern=RUN_NAME, description="The run's name.")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Seed of resets, sampling noise and minibatch order.")
    updates: Count = Field(default=100, ge=1, description="Updates after which the run is done.")
    runs_dir: PlainPath = Field(default=Path("runs"), description="Folder that holds runs/<name>/.")
    trace: bool = Field(
        default=False,
        description="Keep all that workers do, moment by moment, in runs/<name>/trace.jsonl for `vla-stream trace`: "
        "some KB per second and worker.",
    )
    environment: Environment
    policy: Policy
    simulators: Simulators = Simulators()
    generators: Generators = Generators()
    trainer: Trainer
    algorithm: Algorithm = Algorithm()
    flow: Flow = Flow()
    broker: Broker = Broker()
    pretrain: Pretrain | None = None
    evaluation: Evaluation = Evaluation()
    allocation: Allocation | None = None
    held_out: HeldOut | None = Field(default=None, description="Set by `vla-stream eval`, for its own workers.")
    tracking: Tracking = Tracking()

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    @property
    def chunk_steps_per_episode(self) -> int:
        return self.environment.max_steps // self.policy.chunk

    @property
    def segment_steps(self) -> int:
        """T, the most chunk steps that a segment can have."""
        segment = self.simulators.segment
        return self.chunk_steps_per_episode if segment == "episode" else segment.steps

    @property
    def interpreters(self) -> dict[str, Path]:
        """Those of roles whose workers do not run in the launcher's own."""
        named = {"simulator": self.simulators.python, "generator": self.policy.python, "trainer": self.policy.python}
        return {role: python for role, python in named.items() if python is not None}

    @property
    def imitates(self) -> bool:
        """Whether demonstrations are imitated beside the algorithm's own loss."""
        return self.algorithm.imitation_coefficient > 0

    @property
    def slots_in_all(self) -> int:
        return self.simulators.count * self.simulators.env_batches * self.simulators.slots


def load(paths: Sequence[Path | str], overrides: Iterable[str] = ()) -> Config:
    """Read, compose and validate. Raises InputError with one line per problem."""
    if not paths:
        raise InputError("config: no file given, expected at least one, for example configs/quickstart.yaml")
    data: dict[str, Any] = {}
    try:
        for path in paths:
            _merge(data, _read(Path(path)))
        set_by_hand: dict[str, Any] = {}
        for override in overrides:
            _merge(set_by_hand, _parse_override(override))
        _merge(data, set_by_hand)  # at once: options may be set before the name that they belong to
    except RecursionError as exc:
        raise InputError(
            "config: a section that holds itself, expected one of finite depth; remove its *alias"
        ) from exc
    return validate(data, subject=", ".join(str(path) for path in paths))


def with_environment(config: Config, path: Path) -> Config:
    """The config of a run with another simulator: that of the section `environment` in a file. Raises InputError."""
    section = _read(path).get("environment")
    if section is None:
        raise InputError(f"{path}: has no section environment, expected the simulator to attach; add it")
    return validate(config.model_dump(mode="json") | {"environment": section}, subject=str(path))


def validate(data: Mapping[str, Any], subject: str = "config") -> Config:
    """A checked Config from plain data, or InputError."""
    config = parse(Config, data, f"{subject}: ")
    problems = cross_check(config)
    if problems:
        raise InputError("\n".join(f"{subject}: {problem}" for problem in problems))
    return config


def parse(model: type[Model], data: Mapping[str, Any], prefix: str) -> Model:
    """Plain data as a model, nothing converted. Raises InputError with one line per problem, each after `prefix`."""
    try:
        # As JSON, since only there strictness and lists for tuples, texts for paths go together.
        text = json.dumps(dict(data), default=str)
    except (ValueError, TypeError, RecursionError) as exc:
        raise InputError(
            f"{prefix}holds what is no plain data ({exc}), expected texts, numbers, lists, sections"
        ) from exc
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as exc:
        errors = exc.errors()
        # A misspelt key is both unknown and missing: said once.
        meant = {(item["loc"][:-1], _nearest(model, item["loc"])) for item in errors if item["type"] == UNKNOWN_KEY}
        told = [e for e in errors if e["type"] != "missing" or (e["loc"][:-1], e["loc"][-1]) not in meant]
        raise InputError("\n".join(prefix + describe_problem(model, item) for item in told)) from exc


def cross_check(config: Config) -> list[str]:
    """Combinations that cannot work, each naming both fields and the remedy."""
    problems = []
    chunk, horizon = config.policy.chunk, config.environment.max_steps
    if horizon % chunk:
        problems.append(
            f"policy.chunk is {chunk} but environment.max_steps is {horizon}; make max_steps a multiple of {chunk}"
        )
    rows, slot = config.generators.max_batch_size, config.simulators.envs_per_slot
    if rows < slot:
        problems.append(
            f"generators.max_batch_size is {rows} but simulators.envs_per_slot is {slot}; "
            f"raise max_batch_size to at least {slot}, since a slot's request is never split"
        )
    oversized = [size for size in config.generators.padded_sizes if size > rows]
    if oversized:
        problems.append(
            f"generators.padded_sizes holds {oversized[0]} but generators.max_batch_size is {rows}; "
            f"remove it or raise max_batch_size"
        )
    in_order, limit = config.flow.order == "ticket", config.flow.stale_limit_versions
    if in_order and config.flow.stale_limit is not None:
        problems.append(
            "flow.stale_limit is set but flow.order is ticket, where none may exceed flow.max_staleness; "
            "remove stale_limit"
        )
    # Not whether it is set: a run's config was written with all defaults, and is read again.
    ahead = config.trainer.prefetch_segments
    if in_order and ahead != Trainer.model_fields["prefetch_segments"].default:
        problems.append(
            f"trainer.prefetch_segments is {ahead} but flow.order is ticket, where all segments that "
            "flow.max_staleness admits are read ahead; remove prefetch_segments or set order to arrival"
        )
    if limit < config.flow.max_staleness:
        problems.append(
            f"flow.stale_limit is {limit} but flow.max_staleness is {config.flow.max_staleness}; "
            f"raise stale_limit to at least max_staleness"
        )
    if config.trainer.ack == "checkpoint":
        most = 1 + config.flow.max_staleness
        if config.trainer.checkpoint_every > most:
            problems.append(
                f"trainer.ack is checkpoint but trainer.checkpoint_every is {config.trainer.checkpoint_every}; kept "
                f"segments would use up all permits: lower it to {most}, 1 + flow.max_staleness, or raise that"
            )
        if in_order:
            problems.append(
                "trainer.ack is checkpoint but flow.order is ticket: segments given back by a crash would be refused "
                "as too stale; set flow.order to arrival"
            )
    trainer = config.trainer
    if trainer.update == "streaming" and trainer.epochs != 1:
        problems.append(
            f"trainer.update is streaming but trainer.epochs is {trainer.epochs}; set epochs to 1, since each segment "
            "is trained once, as it arrives; trainer.optimiser_steps gives more steps"
        )
    if trainer.update == "buffered" and trainer.optimiser_steps != 1:
        problems.append(
            f"trainer.optimiser_steps is {trainer.optimiser_steps} but trainer.update is buffered, where "
            "trainer.epochs and trainer.minibatch_samples make the steps; remove it or set update to streaming"
        )
    if trainer.segments_per_update % trainer.optimiser_steps:
        problems.append(
            f"trainer.optimiser_steps is {trainer.optimiser_steps} but trainer.segments_per_update is "
            f"{trainer.segments_per_update}; make segments_per_update a multiple of {trainer.optimiser_steps}"
        )
    problems += rank_problems(config, trainer.ranks)
    problems += _algorithm_problems(config)
    problems += _task_problems(config)
    problems += _allocation_problems(config)
    every, checkpoint_every = config.evaluation.every, config.trainer.checkpoint_every
    if every % checkpoint_every:
        problems.append(
            f"evaluation.every is {every} but trainer.checkpoint_every is {checkpoint_every}; make every a multiple of "
            "it, since checkpoints are evaluated"
        )
    if every and not config.evaluation.episodes:
        problems.append(f"evaluation.every is {every} but evaluation.episodes is 0; raise episodes, or set every to 0")
    if config.policy.init_from is not None and config.pretrain is not None:
        problems.append(
            "policy.init_from and pretrain are both set; remove one, since both say where the first weights come from"
        )
    return problems + (config.pretrain.problems() if config.pretrain else [])


def _allocation_problems(config: Config) -> list[str]:
    limits = config.allocation
    if limits is None:
        return []
    problems = []
    for role, count in (("simulators", config.simulators.count), ("generators", config.generators.count)):
        least, most = getattr(limits, f"least_{role}"), getattr(limits, f"most_{role}")
        if not least <= count <= most:
            problems.append(
                f"{role}.count is {count} but allocation.least_{role} is {least} and allocation.most_{role} {most}; "
                "set count between them"
            )
    both = config.simulators.count + config.generators.count
    if limits.together is not None and both > limits.together:
        problems.append(
            f"simulators.count and generators.count are {both} but allocation.together is {limits.together}; lower "
            "one of them, or raise together"
        )
    return problems


def rank_problems(config: Config, ranks: int, device: str = "") -> list[str]:
    """Why a trainer of so many ranks cannot work. device: theirs, instead of the config's."""
    trainer, problems = config.trainer, list[str]()
    if ranks == 1:
        return problems
    share = trainer.segments_per_update // trainer.optimiser_steps
    if trainer.segments_per_update % ranks:
        problems.append(
            f"trainer.ranks is {ranks} but trainer.segments_per_update is {trainer.segments_per_update}; make "
            f"segments_per_update a multiple of {ranks}, since each rank trains as many"
        )
    elif share % ranks:
        problems.append(
            f"trainer.ranks is {ranks} but each of trainer.optimiser_steps {trainer.optimiser_steps} takes {share} of "
            f"the segments; lower optimiser_steps, or make segments_per_update a multiple of "
            f"{ranks * trainer.optimiser_steps}"
        )
    if trainer.record_every:
        problems.append(
            f"trainer.ranks is {ranks} but trainer.record_every is {trainer.record_every}: what `replay` makes once "
            "more, in one process, would be rounded otherwise; set ranks to 1 or record_every to 0"
        )
    if not device and trainer.device.partition(":")[2]:
        problems.append(
            f"trainer.ranks is {ranks} but trainer.device is {trainer.device}, which is one device; set it to "
            f"{trainer.device.partition(':')[0]}, or attach them with --device"
        )
    return problems


def _algorithm_problems(config: Config) -> list[str]:
    algorithm, simulators, trainer = config.algorithm, config.simulators, config.trainer
    name = algorithm.name
    problems = algorithm.problems()
    if not algorithm.has_critic:
        for option in ("value_learning_rate", "critic_warmup_updates"):
            if getattr(trainer, option) is not None:
                problems.append(
                    f"trainer.{option} is set but algorithm.name is {name}, which has no critic; remove it or set it "
                    "to null"
                )
        if simulators.segment != "episode":
            problems.append(
                f"algorithm.name is {name} but simulators.segment is {{steps: {simulators.segment.steps}}}; set "
                "segment to episode, since whole episodes are judged"
            )
    if algorithm.compares_rows and simulators.envs_per_slot < 2:
        problems.append(
            f"algorithm.name is {name} but simulators.envs_per_slot is {simulators.envs_per_slot}; raise envs_per_slot "
            "to at least 2, since the rows of a slot are compared"
        )
    if algorithm.imitation_coefficient > 0 and config.pretrain is None:
        problems.append(
            f"algorithm.imitation_coefficient is {algorithm.imitation_coefficient} but there is no section pretrain, "
            "whose demonstrations are imitated; add it or set the coefficient to 0"
        )
    return problems


def _task_problems(config: Config) -> list[str]:
    listed, simulators = config.environment.tasks, config.simulators
    if len(listed) > MOST_TASKS:
        return [f"environment.tasks lists {len(listed)}, at most {MOST_TASKS}; leave some to runs of their own"]
    for figure in ("weight", "batches"):
        total = sum(getattr(task, figure) for task in listed.values())
        if total > LONGEST_ROUND:
            return [
                f"environment.tasks: {figure} adds up to {total}, at most {LONGEST_ROUND}; give smaller numbers of the "
                "same proportions"
            ]
    batches = simulators.count * simulators.env_batches
    if batches and (missing := tasks.left_out(config, simulators.count)):
        return [
            f"environment.tasks has no environment batch for {', '.join(missing)}: simulators.count × "
            f"simulators.env_batches is {batches}, and each batch plays one task; raise either, or lower tasks' batches"
        ]
    return []


def notes(config: Config) -> list[str]:
    """Combinations that work but deserve a sentence."""
    remarks = []
    if "correction" in config.algorithm.used and config.algorithm.correction == "none" and config.flow.max_staleness:
        remarks.append(
            f"algorithm.correction is none but flow.max_staleness is {config.flow.max_staleness}: data of older "
            "weights is trained as if the newest had made it; expect worse learning, or set correction to decoupled"
        )
    admitted = (1 + config.flow.max_staleness) * config.trainer.segments_per_update
    if config.slots_in_all > admitted:
        remarks.append(
            f"{config.slots_in_all} slots but only {admitted} permits, (1 + flow.max_staleness) × "
            "trainer.segments_per_update: some slots will always idle; lower simulators.slots or raise either"
        )
    if config.flow.order == "arrival" and config.trainer.segments_per_update < 4 * config.slots_in_all:
        remarks.append(
            f"trainer.segments_per_update is {config.trainer.segments_per_update}, fewer than four times the "
            f"{config.slots_in_all} slots: expect some segments staler than flow.max_staleness"
        )
    return remarks


def describe_problem(model: type[BaseModel], item: Mapping[str, Any]) -> str:
    """One sentence for one pydantic error: the dotted key, what was got, what was expected, the nearest known key."""
    parts = _parts(item["loc"])
    key = ".".join(parts)
    if item["type"] == UNKNOWN_KEY:
        near = _nearest(model, item["loc"])
        known = ", ".join(sorted(_known_keys(model, parts[:-1])))
        return f"unknown key {key}; " + (f"did you mean {near}?" if near else f"known here: {known}")
    if item["type"] == "missing":
        return f"{key} is missing; {_description(model, parts)}"
    expected = str(item["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    if item["type"] in {"model_type", "dict_type"}:
        expected = "a mapping of its keys"
    return f"{key} is {item['input']!r}, expected {expected}"


def _parts(loc: Sequence[str | int]) -> list[str]:
    return [str(part) for part in loc if part not in {"Steps", "literal['episode']"}]


def _nearest(model: type[BaseModel], loc: Sequence[str | int]) -> str | None:
    parts = _parts(loc)
    near = difflib.get_close_matches(parts[-1], _known_keys(model, parts[:-1]), n=1)
    return near[0] if near else None


class _Loader(yaml.SafeLoader):
    """YAML as people write it: plain PyYAML reads 1e-3 as a text, since YAML 1.1 wants 1.0e-3."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"), None)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or "not UTF-8 text"
        raise InputError(f"{path}: cannot read the config ({reason}); give the path of a YAML file") from exc
    try:
        data = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        place = getattr(exc, "problem_mark", None)
        where = f" at line {place.line + 1}" if place else ""
        raise InputError(f"{path}: not valid YAML{where}; {getattr(exc, 'problem', exc)}") from exc
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds {type(data).__name__}, expected a mapping of sections")
    return data


def _parse_override(text: str) -> dict[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not all(key.split(".")):
        raise InputError(f"--set {text}: expected section.key=value, for example --set trainer.epochs=2")
    try:
        parsed: Any = yaml.load(value, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise InputError(f"--set {text}: {value!r} is not valid YAML") from exc
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return dict(parsed)


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            before = into[key].get("name")
            if before is not None and value.get("name", before) != before:
                into[key].pop("options", None)  # they are those of another environment or policy
            _merge(into[key], value)
        else:
            into[key] = value


def _section(model: type[BaseModel], parts: Sequence[str]) -> type[BaseModel] | None:
    named = False
    for part in parts:
        if named:
            named = False  # a name of the user's own, as of a task
            continue
        field = model.model_fields.get(part)
        if field is None:
            return None
        found = [item for item in _flat(field.annotation) if isinstance(item, type) and issubclass(item, BaseModel)]
        if not found:
            return None
        model, named = found[0], get_origin(field.annotation) is dict
    return model


def _flat(annotation: object) -> list[object]:
    """The annotation and all that it is made of, through unions and Annotated."""
    return [annotation, *(inner for item in get_args(annotation) for inner in _flat(item))]


def _known_keys(model: type[BaseModel], parts: Sequence[str]) -> list[str]:
    section = _section(model, parts)
    return list(section.model_fields) if section else []


def _description(model: type[BaseModel], parts: Sequence[str]) -> str:
    section = _section(model, parts[:-1])
    field = section.model_fields.get(parts[-1]) if section else None
    return (field.description if field else None) or "see configs/quickstart.yaml"
