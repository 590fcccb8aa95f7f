"""Convolution networks in channels_last, an autoencoder with group norm, and a Hugging Face ViT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from tests.parity.programs import Program
from tests.parity.programs_text import hugging_face


def conv_block(dimensions: int, channels: int) -> nn.Sequential:
    """Convolution, batch norm, ReLU in two or three dimensions."""
    conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dimensions == 2 else (nn.Conv3d, nn.BatchNorm3d)
    return nn.Sequential(conv(channels, channels, 3, padding=1), norm(channels), nn.ReLU())


@dataclass(eq=False)
class ChannelsLastCNN(Program):
    """BatchNorm writes its running statistics without saying so; layouts must survive."""

    dimensions: int = 2
    device_bytes: ClassVar[int] = 208 << 10

    def build_model(self) -> nn.Module:
        first = nn.Conv2d(3, 16, 3, padding=1) if self.dimensions == 2 else nn.Conv3d(3, 16, 3)
        blocks = [conv_block(self.dimensions, 16) for _ in range(5)]
        pool = nn.AdaptiveAvgPool2d(1) if self.dimensions == 2 else nn.AdaptiveAvgPool3d(1)
        model = nn.Sequential(first, *blocks, pool, nn.Flatten(), nn.Linear(16, 4))
        return model.to(memory_format=self.memory_format)

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.dimensions == 2 else torch.channels_last_3d

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        size = (12, 12) if self.dimensions == 2 else (7, 7, 7)
        x = torch.randn(4, 3, *size).to(memory_format=self.memory_format)
        return F.cross_entropy(model(x), torch.randint(0, 4, (4,)))


class AutoencoderNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU(),
            nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.InstanceNorm2d(24, affine=True),
            nn.SiLU(),
        )  # fmt: skip
        middle = [nn.Sequential(nn.Conv2d(16, 16, 1), nn.GroupNorm(4, 16)) for _ in range(5)]
        self.up = nn.Sequential(
            nn.ConvTranspose2d(24, 16, 2, stride=2), nn.GroupNorm(4, 16), nn.SiLU(),
            *middle,
            nn.Conv2d(16, 8, 1), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 3, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(F.max_pool2d(F.pad(self.down(x), (0, 1, 0, 1)), 2, stride=1)).sigmoid()


@dataclass(eq=False)
class Autoencoder(Program):
    """Transposed convolution, group and instance norm, pooling with indices, resampling."""

    device_bytes: ClassVar[int] = 192 << 10

    def build_model(self) -> nn.Module:
        return AutoencoderNetwork()

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        x = torch.rand(4, 3, 16, 16)
        return F.mse_loss(model(x), x)


@dataclass(eq=False)
class ViT(Program):
    """Hugging Face ViT classifier with two layers."""

    device_bytes: ClassVar[int] = 336 << 10

    def build_model(self) -> nn.Module:
        transformers = hugging_face()
        config = transformers.ViTConfig(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96,
            image_size=16, patch_size=4, num_labels=4, hidden_dropout_prob=0.1,
        )  # fmt: skip
        return transformers.ViTForImageClassification(config)

    def loss(self, model: nn.Module, step_index: int) -> torch.Tensor:
        images, labels = torch.randn(4, 3, 16, 16), torch.randint(0, 4, (4,))
        return model(pixel_values=images, labels=labels).loss
