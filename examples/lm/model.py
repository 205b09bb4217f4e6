"""A byte-level GPT as an ordinary LightningModule. Nothing here knows how its training is parallelised."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MetricCollection
from torchmetrics.text import Perplexity

VOCABULARY = 256


class BitsPerByte(Perplexity):
    """The mean negative log2-likelihood of a byte."""

    def compute(self) -> Tensor:
        return super().compute().log2()


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(x).view(split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ByteGPT(LightningModule):
    """A GPT over bytes.

    Args:
        context: The longest window it can read.
        width: Size of the residual stream.
        depth: Number of blocks.
        heads: Attention heads per block.
        learning_rate: Peak learning rate.
        weight_decay: For matrices only; vectors and embeddings are not decayed.
        warmup_steps: Steps until the peak, after which a cosine falls to a tenth of it at the end of training.
        tie_head: Whether the output layer is the input embedding.
    """

    def __init__(
        self,
        context: int = 128,
        width: int = 256,
        depth: int = 2,
        heads: int = 4,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        tie_head: bool = True,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{width=} must be a multiple of {heads=}")
        self.save_hyperparameters()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._init_weights)
        self._quieten_residuals(depth)
        if tie_head:
            self.head.weight = self.bytes.weight
        self.val_metrics = MetricCollection(
            {"perplexity": Perplexity(), "bits_per_byte": BitsPerByte()},
            prefix="val_",
            # Both count the same sums: update one and let the other read them.
            compute_groups=[["perplexity", "bits_per_byte"]],
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the byte that follows each position."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        tokens, targets = batch
        self.val_metrics.update(self(tokens).float(), targets)
        self.log_dict(self.val_metrics, prog_bar=True, batch_size=len(tokens))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self._parameter_groups(), lr=self.hparams.learning_rate, betas=(0.9, 0.95))
        scheduler = LambdaLR(optimizer, self._warmup_cosine(int(self.trainer.estimated_stepping_batches)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.inference_mode()
    def generate(self, prompt: str, n: int, temperature: float = 0.8, seed: int = 0) -> str:
        """`prompt` and `n` more bytes, sampled."""
        generator = torch.Generator(self.device).manual_seed(seed)
        tokens = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(n):
            logits = self(tokens[:, -self.hparams.context :])[0, -1]
            following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, following[None]], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")

    def _warmup_cosine(self, steps: int) -> Callable[[int], float]:
        warmup = self.hparams.warmup_steps

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            progress = min(1.0, (step - warmup) / max(1, steps - warmup))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

        return factor

    def _parameter_groups(self) -> list[dict]:
        def is_decayed(name: str, parameter: nn.Parameter) -> bool:
            return parameter.ndim > 1 and not name.startswith(("bytes", "positions"))

        decayed = [parameter for name, parameter in self.named_parameters() if is_decayed(name, parameter)]
        others = [parameter for name, parameter in self.named_parameters() if not is_decayed(name, parameter)]
        return [
            {"params": decayed, "weight_decay": self.hparams.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]

    def _residual_outputs(self) -> Iterator[nn.Parameter]:
        for block in self.blocks:
            yield block.attention.out.weight
            yield block.mlp[-1].weight

    def _quieten_residuals(self, depth: int) -> None:
        # Each block adds twice to the residual stream: scaled so, its variance does not grow with the depth.
        for weight in self._residual_outputs():
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * depth))

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
