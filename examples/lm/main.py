"""Trains the byte-level GPT: python examples/lm/main.py fit --config examples/lm/configs/zero1.yaml

The parallel strategy is one word of the configuration. No line of this program, nor of the model, knows of it.
"""

import warnings

from data import StdlibBytes
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from model import ByteGPT


class LanguageModelCLI(LightningCLI):
    """Lightning's command line, with the window length given once."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.context", "data.context")


def main() -> None:
    # Windows are cut from mapped memory; loader processes would only take cores from the training.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    # Lightning 2.6 uses a name that newer torch deprecates; nothing to be done about it here.
    warnings.filterwarnings("ignore", ".*LeafSpec.*")
    LanguageModelCLI(ByteGPT, StdlibBytes, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
