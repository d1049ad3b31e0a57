"""The texts of the warnings about mistakes in the use of a scaler, and what to do instead."""

CLIPPED_WHILE_SCALED = (
    "gradients were clipped to max_norm={max_norm:g} while they were still multiplied by the loss "
    "scale, {scale:g}, so they are almost zero after unscaling: call "
    "scaler.clip_grad_norm_(optimizer, max_norm), or scaler.unscale_(optimizer) before clipping"
)
HAVE_SAME_NORM = (
    "the norm of the gradients was {max_norm:g} in each of the first steps while they were still "
    "multiplied by the loss scale, {scale:g}. If they were clipped, they are almost zero after "
    "unscaling: call scaler.clip_grad_norm_(optimizer, max_norm), or scaler.unscale_(optimizer) "
    "before clipping"
)
CLIPPED_TWICE = (
    "gradients had been clipped to {max_norm:g} before the step while they were still multiplied "
    "by the loss scale, so they are almost zero after unscaling: the optimizer's "
    "max_grad_norm={max_norm:g} clips them inside the step; remove the other clipping"
)
NEVER_STEPPED = (
    "a GradScaler has scaled {losses} losses, and all their parameters have changed, but "
    "scaler.step(optimizer) was not called, so the gradients are still multiplied by the loss "
    "scale: call scaler.step(optimizer) instead of optimizer.step(), and then scaler.update()"
)
STEPPED_BESIDE = (
    "a GradScaler has scaled a loss, and all its parameters have changed, but by other steps than "
    "scaler.step(optimizer), so their gradients are still multiplied by the loss scale: call "
    "scaler.step(optimizer) for each optimizer, and then scaler.update()"
)
LOST_SCALE = (
    "the loss scale has fallen to {scale:g}, at which each step is skipped, since gradients were "
    "not finite at any scale: scaler.overflow_report(model) names their parameters, and "
    "GradScaler(max_consecutive_skips=20) ends such a run sooner"
)
STEPPED_IN_SPITE = (
    "optimizer.step() has taken a step although scaler.unscale_(optimizer) had found gradients "
    "that are not finite: call scaler.step(optimizer) instead, which skips such steps"
)

COMPUTED_AGAIN = (
    "gradients were computed again since they were unscaled, so they are still multiplied by the "
    "loss scale: call scaler.update() after each step, also after one that failed, and if a batch "
    "is dropped after scaler.unscale_(optimizer). Unscale or clip once, after the last micro-batch "
    "of a step"
)

SCALED_TWICE = (
    "a loss was multiplied by the loss scale twice, so its gradients are still multiplied by it "
    "after unscaling: call scaler.scale(loss) once"
)
FORGOTTEN = (
    "the gradients of {steps} steps in a row were divided by the loss scale, but no loss was "
    "multiplied by it: call scaler.scale(loss).backward()"
)
NEVER_SCALED = (
    "a loss module with scaler= has computed {losses} losses, but none of them was scaled: call "
    "scaler.scale(loss).backward(), scaler.step(optimizer) and scaler.update(). Evaluate under "
    "torch.no_grad()"
)
STEPPED_ALONE = (
    "optimizer.step() was called by itself, with gradients that are still multiplied by the loss "
    "scale: call scaler.step(optimizer) instead, and then scaler.update()"
)
UNUSED = (
    "losses were scaled, but their backward passes did not begin at the scaled losses, so the "
    "gradients were divided by the loss scale for nothing: call scaler.scale(loss).backward()"
)
ALWAYS_SKIPPED = (
    "each of the last {steps} steps was skipped, since gradients were not finite at any scale: "
    "scaler.overflow_report(model) names their parameters, and "
    "GradScaler(max_consecutive_skips=20) ends such a run"
)
