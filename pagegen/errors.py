"""Everything pagegen raises for a cause that a user can remedy.

A message is one line: what was asked, what is allowed, what to change. The command line prints it and exits 2;
the server answers HTTP 400 with it. Anything else that escapes is a defect of pagegen.
"""


class PagegenError(Exception):
    """Base of every error with a remedy."""


class SpecError(PagegenError):
    """A kernel specification that is malformed or that no template supports."""


class ConfigError(PagegenError):
    """A knob, flag or environment variable outside its allowed values."""


class RenderError(PagegenError):
    """A template that does not render."""


class BuildError(PagegenError):
    """A missing or failing compiler; `log` holds the compiler's own output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class CheckError(PagegenError):
    """The correctness gate could not be run (a failed gate is a result, not an error)."""


class GateError(CheckError):
    """A kernel that had to pass the gate did not: the answer is no, which is exit status 1."""


class KernelError(PagegenError):
    """Arguments that a kernel refuses: shape, dtype, stride, device or range."""


class PackageError(PagegenError):
    """A kernel package that is damaged, foreign to this machine, or of an unknown format."""


class UntunedShapeWarning(UserWarning):
    """A batch outside what a package was measured on: its untuned default serves it."""


class ModelError(PagegenError):
    """Weights, configuration or tokenizer that cannot be loaded."""


class RequestError(PagegenError):
    """A generation request that cannot be served; `param` names the offending field if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
