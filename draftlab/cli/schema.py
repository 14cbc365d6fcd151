"""Every setting there is: the union of all rooms' Settings, one class a primary config.

This is the only file that knows them all. It imports torch: import it inside `run`, never at the
top of a command.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, NonNegativeInt, SerializeAsAny, field_validator

from draftlab.cli.hardware import HardwareSettings
from draftlab.data.settings import DataSettings
from draftlab.decoding.settings import DecodeSettings, RegenerateSettings
from draftlab.drafters.adapters import AdapterSettings
from draftlab.drafters.base import DrafterSettings, drafter_class
from draftlab.errors import ConfigError
from draftlab.evaluation.audit_settings import AuditSettings
from draftlab.evaluation.settings import EvalSettings
from draftlab.export.settings import ExportSettings
from draftlab.runs.paths import PathSettings
from draftlab.runs.trackers import TrackerSettings
from draftlab.settings.base import Settings, parse_settings
from draftlab.settings.compose import Composed
from draftlab.targets.settings import TargetSettings
from draftlab.training.settings import OptimSettings, TrainSettings

C = TypeVar("C", bound="CommandSettings")


def parse_drafter(value: Any) -> Any:
    """Turn the keys of a conf/drafter yaml into the Settings class of its kind.

    Raises:
        ConfigError: unknown kind, or a wrong key, with the known ones.
    """
    if not isinstance(value, Mapping):
        return value
    if "kind" not in value:
        raise ConfigError("drafter.kind is required: the name of a file in draftlab/drafters")
    return parse_settings(drafter_class(str(value["kind"])).settings_class, value, where="drafter")


AnyDrafter = Annotated[SerializeAsAny[DrafterSettings], BeforeValidator(parse_drafter)]


class About(Settings):
    """What a recipe says of itself; null until measured.

    Attributes:
        paper: where the method is described.
        needs: hardware it was written for.
        hours: how long it took there.
        tau: acceptance length it reached.
    """

    paper: str | None
    needs: str | None
    hours: float | None
    tau: float | None


class CommandSettings(Settings):
    """Settings that every composing command has.

    Attributes:
        seed: the only root of randomness.
    """

    about: About
    seed: NonNegativeInt
    target: TargetSettings
    data: DataSettings
    regenerate: RegenerateSettings
    optim: OptimSettings
    train: TrainSettings
    decode: DecodeSettings
    eval: EvalSettings
    export: ExportSettings
    hardware: HardwareSettings
    tracker: TrackerSettings
    paths: PathSettings


class RunSettings(CommandSettings):
    """conf/train.yaml: a training run.

    Attributes:
        resume: auto (go on with an interrupted run of the same settings), never, or a run.
        init: a drafter whose training goes on with new data; None starts anew.
        drafter: what is trained, by kind.
        adapter: whether it is trained itself, or adapters on it.
    """

    resume: str
    init: str | None
    drafter: AnyDrafter
    adapter: AdapterSettings


class EvalCommandSettings(CommandSettings):
    """conf/eval.yaml: acceptance, speed and losslessness of one drafter or several.

    Attributes:
        drafter: by kind, or the name of a trained one: a run, an exported folder or a hub id.
        drafters: several, by the same names; None takes `drafter` alone.
    """

    drafter: AnyDrafter | str
    drafters: tuple[str, ...] | None

    @field_validator("drafters")
    @classmethod
    def _check_drafters(cls, drafters: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if drafters == ():
            raise ValueError("names no drafter; pass drafters=[ngram,RUN], or drafter=RUN alone")
        return drafters


class AuditCommandSettings(CommandSettings):
    """conf/audit.yaml: whether one drafter changes what the target says.

    Attributes:
        drafter: by kind, or the name of a trained one: a run, an exported folder or a hub id.
        audit: how much is looked at.
    """

    drafter: AnyDrafter | str
    audit: AuditSettings


class GenerateCommandSettings(CommandSettings):
    """conf/generate.yaml: one answer, or several.

    Attributes:
        drafter: by kind, or the name of a trained one.
        prompt: what is asked; "-" reads it from stdin.
        prompts: a file of questions, one a line or chats; "-" is stdin.
    """

    drafter: AnyDrafter | str
    prompt: str | None
    prompts: str | None


class ExportCommandSettings(CommandSettings):
    """conf/export.yaml: a trained drafter in a serving format.

    Attributes:
        drafter: the name of a trained one: a run, or a drafter's folder.
    """

    drafter: AnyDrafter | str


def settings_of(cls: type[C], composed: Composed) -> C:
    """Check what was composed.

    Raises:
        ConfigError: naming every key that is wrong or was left open.
    """
    open_keys = [key for key, value in flat_keys(composed.data).items() if value == "???"]
    if open_keys:
        asked = " ".join(f"{key}=VALUE" for key in open_keys)
        raise ConfigError(f"{', '.join(open_keys)} must be given; pass {asked}")
    return parse_settings(cls, composed.data)


def flat_keys(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """List nested keys as dotted ones, such as {"optim.lr": 1e-4}."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_keys(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
