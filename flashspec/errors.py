"""Every error a user can cause, as one tree: each message names the value, the limit and the next step."""


class FlashSpecError(Exception):
    """Base of all errors raised on purpose; the CLI prints it as one line and exits with code 2."""


class OptionError(FlashSpecError, ValueError):
    """An option or sampling parameter outside its range."""


class ModelError(FlashSpecError):
    """A model that cannot be found, read or run."""


class UnsupportedModelError(ModelError):
    """A model whose cache cannot be rolled back, or whose architecture is not a decoder."""


class VocabularyError(ModelError):
    """A draft model whose tokenizer is not the target's."""


class PromptError(FlashSpecError, ValueError):
    """A prompt that is empty, unreadable or does not fit."""


class MemoryLimitError(FlashSpecError):
    """Not enough memory for the weights or for another sequence's keys and values."""


class EngineStartError(FlashSpecError):
    """An engine in another process that did not start, with what its log says."""


class EngineLostError(FlashSpecError):
    """An engine in another process that went away, or said nothing for too long."""
