"""The contents of the pictures: a title for each benchmark, and its cases in plain words."""

from dataclasses import dataclass

MOST_CASES = 8


@dataclass(frozen=True)
class Picture:
    """The title of a picture, and the labels of its cases by `operation/shape/dtype`.

    Most cases are measured either on GPUs or on CPUs. The first MOST_CASES that were measured on
    the machine are drawn.
    """

    title: str
    labels: dict[str, str]


PICTURES = {
    "cross_entropy": Picture(
        "Cross-entropy and its gradient (rows × classes)",
        {
            "train/8192x50257/bfloat16": "8192 × 50257\nbfloat16",
            "train/8192x50257/float32": "8192 × 50257\nfloat32",
            "train/8192x128256/bfloat16": "8192 × 128256\nbfloat16",
            "train/32768x65536/bfloat16": "32768 × 65536\nbfloat16",
            "train/32768x4096/bfloat16": "32768 × 4096\nbfloat16",
            "train/32768x1024/bfloat16": "32768 × 1024\nbfloat16",
            "train/1024x32000/bfloat16": "1024 × 32000\nbfloat16",
            "train/1024x32000/float32": "1024 × 32000\nfloat32",
            "train/512x50257/bfloat16": "512 × 50257\nbfloat16",
            "train_in_place/512x50257/bfloat16": "512 × 50257, bfloat16\nin place",
            "train/128x262144/bfloat16": "128 × 262144\nbfloat16",
            "train/1024x1000/bfloat16": "1024 × 1000\nbfloat16",
            "train/8192x100/float32": "8192 × 100\nfloat32",
            "train/8x21x256x256/bfloat16": "8 images of 256 × 256\n21 classes, bfloat16",
            "train/8192x1000/bfloat16": "8192 × 1000\nbfloat16",
        },
    ),
    "linear_cross_entropy": Picture(
        "The loss of a last layer, with all gradients (rows × features × classes, bfloat16)",
        {
            "train/256x512x50257/bfloat16": "256 × 512 × 50257",
            "train/1024x512x50257/bfloat16": "1024 × 512 × 50257",
            "train/4096x512x50257/bfloat16": "4096 × 512 × 50257",
            "train/1024x96x50257/bfloat16": "1024 × 96 × 50257",
            "train/1024x512x128256/bfloat16": "1024 × 512 × 128256",
            "train/1024x288x256000/bfloat16": "1024 × 288 × 256000",
            "train/1024x768x50257/bfloat16": "1024 × 768 × 50257",
            "train/1024x4096x128256/bfloat16": "1024 × 4096 × 128256",
            "train/4096x4096x128256/bfloat16": "4096 × 4096 × 128256",
        },
    ),
    "fused_adam": Picture(
        "AdamW (64 × 1M: 64 tensors of a million elements)",
        {
            "step/64x1M/float32": "clip and update, 64 × 1M\nfloat32",
            "step/64x1M/bfloat16": "clip and update, 64 × 1M\nbfloat16, float32 masters",
            "step_remainder/64x1M/bfloat16": "clip and update, 64 × 1M\nbfloat16, remainders",
            "step_smallest/64x1M/bfloat16": "clip and update, 64 × 1M\nbfloat16 moments too",
            "update/64x1M/float32": "update alone, 64 × 1M\nfloat32",
            "update/64x1M/bfloat16": "update alone, 64 × 1M\nbfloat16, float32 masters",
            "step/resnet50/float32": "clip and update, ResNet-50\nfloat32",
            "step/resnet50/bfloat16": "clip and update, ResNet-50\nbfloat16, float32 masters",
        },
    ),
    "multi_tensor": Picture(
        "Lists of float32 gradients (64 × 1M: 64 tensors of a million elements)",
        {
            "total_norm/64x1M/float32": "norm\n64 × 1M",
            "clip/64x1M/float32": "clip to a norm\n64 × 1M",
            "clip_below_limit/64x1M/float32": "clip, norm within bounds\n64 × 1M",
            "unscale_norm_clip/64x1M/float32": "unscale, norm and clip\n64 × 1M",
            "total_norm/resnet50/float32": "norm\nResNet-50",
            "unscale_norm_clip/resnet50/float32": "unscale, norm and clip\nResNet-50",
            "total_norm/10000x64/float32": "norm\n10,000 × 64",
            "unscale_norm_clip/10000x64/float32": "unscale, norm and clip\n10,000 × 64",
        },
    ),
    "grad_scaler": Picture(
        "What loss scaling costs in each step (1000 × 64K: 1000 tensors of 65,536 elements)",
        {
            "step/10x1K/float32": "without clipping\n10 × 1K",
            "step_clip/10x1K/float32": "with clipping\n10 × 1K",
            "step/1000x1K/float32": "without clipping\n1000 × 1K",
            "step_clip/1000x1K/float32": "with clipping\n1000 × 1K",
            "step/1000x64K/float32": "without clipping\n1000 × 64K",
            "step_clip/1000x64K/float32": "with clipping\n1000 × 64K",
            "step_clip_below_limit/1000x64K/float32": "clipping, norm within bounds\n1000 × 64K",
            "step_on_device/1000x64K/float32": "optimizer skips by itself\n1000 × 64K",
        },
    ),
    "patched_step": Picture(
        "Unchanged programs under ampfuse.patch(): unscale, clip, AdamW, update of the scale",
        {
            "patched_step/100x1K/float32": "100 tensors\nof 1024 elements",
            "patched_step/1000x1K/float32": "1000 tensors\nof 1024 elements",
            "patched_step/resnet50/float32": "ResNet-50",
        },
    ),
    "training": Picture(
        "Whole training steps",
        {
            "step/gpt2-124m/float32": "GPT-2 124M\nfloat32",
            "step/gpt2-124m/bfloat16": "GPT-2 124M\nbfloat16 autocast",
            "step/gpt2-124m/float16": "GPT-2 124M\nfloat16 autocast",
            "step/vit-b-16/float32": "ViT-B/16\nfloat32",
            "step/vit-b-16/bfloat16": "ViT-B/16\nbfloat16 autocast",
            "step/vit-b-16/float16": "ViT-B/16\nfloat16 autocast",
            "step/gpt2-small/float32": "small GPT-2\nfloat32",
            "step/gpt2-small/bfloat16": "small GPT-2\nbfloat16 autocast",
            "step/vit-small/float32": "small ViT\nfloat32",
            "step/vit-small/bfloat16": "small ViT\nbfloat16 autocast",
        },
    ),
}
