"""msgspec as far as SGLang's record of kernels uses it."""

import dataclasses


class Struct:
    def __init_subclass__(cls, frozen=False):
        dataclasses.dataclass(frozen=frozen)(cls)
