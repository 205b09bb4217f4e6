"""A LightningCLI's program that trains the GPT on random tokens, for `lightning-parstrat tune`.

    sudo lightning-parstrat tune -- python -m benchmarks.two_nodes --rate 1gbit -- \\
        python -m benchmarks.gpt_cli fit --trainer.accelerator cpu --trainer.num_nodes 2 --trainer.devices 1
"""

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from benchmarks.gpt import Decoder, RandomTokens
from benchmarks.peers import GPT


class Model(GPT):
    """Of 33.7 million parameters by default."""

    def __init__(self, width: int = 512, depth: int = 8) -> None:
        super().__init__(Decoder(width=width, depth=depth))


class Tokens(LightningDataModule):
    """As many as some hundred steps need."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(RandomTokens(400 * self.batch_size), batch_size=self.batch_size)


def main() -> None:
    LightningCLI(Model, Tokens, save_config_callback=None)


if __name__ == "__main__":
    main()
