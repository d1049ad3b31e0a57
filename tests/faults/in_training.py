"""Faults in the core of the Python package: losses, optimizers, scaler, clipping, graphs, ranks."""

from fault import Fault

FAULTS = [
    # --- the scaler -----------------------------------------------------------------------------
    Fault(
        "A scaler that refuses a state dict for its process group has taken over its options.",
        "python/ampfuse/amp/_saved.py",
        """\
            state.policy.check_process_group(self.process_group)
            self.policy, torchs = state.policy, state.torchs
""",
        """\
            self.policy, torchs = state.policy, state.torchs
            state.policy.check_process_group(self.process_group)
""",
        "tests/python/amp",
    ),
    Fault(
        "After a ScaleCollapseError training cannot go on: the optimizers still count as stepped.",
        "python/ampfuse/amp/_device_scaler.py",
        """\
        self._per_optimizer_states.clear()
        self._inspections.clear()
        if self.max_consecutive_skips is not None:
            self._history.raise_if_collapsed(self.max_consecutive_skips)
""",
        """\
        if self.max_consecutive_skips is not None:
            self._history.raise_if_collapsed(self.max_consecutive_skips)
        self._per_optimizer_states.clear()
        self._inspections.clear()
""",
        "tests/python/amp",
    ),
    Fault(
        "A first step of torch's fused SGD that overflows leaves its momentum uninitialised.",
        "python/ampfuse/optim/stepping.py",
        "    if flag is not None and makes_momentum(optimizer) and flag.item():",
        "    if flag is not None and not makes_momentum(optimizer) and flag.item() > 1:",
        "tests/python/amp",
    ),
    Fault(
        "Mastered lets stale options of its groups overwrite what the inner optimizer has set.",
        "python/ampfuse/optim/mastered.py",
        "if name not in PARAMS and agreed.get(name) is not value:",
        "if name not in PARAMS:",
        "tests/python/optim",
    ),
    Fault(
        "Saving a scaler counts as reading the scale, which silences warnings about mistakes.",
        "python/ampfuse/amp/_saved.py",
        """\
            own |= zip(NORMS, self._history.norms(), strict=True)
            return {**super().state_dict(), **self.policy.options, **own}
""",
        """\
            own |= zip(NORMS, self._history.norms(), strict=True)
        return {**super().state_dict(), **self.policy.options, **own}
""",
        "tests/python/amp tests/python/project/test_mistakes.py",
    ),
    Fault(
        "A scaler's state dict has overflows in a row and number of updates under swapped names.",
        "python/ampfuse/amp/_saved.py",
        """("_hysteresis_tracker", "_consecutive_skips", "_updates")""",
        """("_hysteresis_tracker", "_updates", "_consecutive_skips")""",
        "tests/python/amp tests/python/optim",
    ),
    Fault(
        "A state dict of torch's scaler resets the statistics of norms, which it does not have.",
        "python/ampfuse/amp/_saved.py",
        """pairs = zip(NORMS, norms, strict=True)""",
        """pairs = zip(NORMS, NO_NORMS, strict=True)""",
        "tests/python/amp",
    ),
    Fault(
        "overflow_report searches the last 15 steps, not 16.",
        "python/ampfuse/amp/_history.py",
        """deque(maxlen=REPORTED_STEPS)""",
        """deque(maxlen=REPORTED_STEPS - 1)""",
        "tests/python/amp",
    ),
    Fault(
        "A scaler ignores its process group if the optimizer has sharded DTensors.",
        "python/ampfuse/gradients/inspection.py",
        """for group in [*groups, *([] if process_group is None else [process_group])]:""",
        """for group in groups or [process_group]:""",
        "tests/python/distributed tests/python/amp",
    ),
    Fault(
        "A step clips by the scaler's norms though its closure has computed new gradients.",
        "python/ampfuse/optim/stepping.py",
        """\
    if not is_ours(optimizer) or args or not steps_alone(optimizer):
        return _step_with_attributes(optimizer, signals, args, kwargs)
    optimizer._slot.signals = signals
    try:
        return optimizer.step(**kwargs)
""",
        """\
    if not is_ours(optimizer) or not steps_alone(optimizer):
        return _step_with_attributes(optimizer, signals, args, kwargs)
    optimizer._slot.signals = signals
    try:
        return optimizer.step(*args, **kwargs)
""",
        "tests/python/amp tests/python/optim",
    ),
    # --- optimizers -----------------------------------------------------------------------------
    Fault(
        "A change of a group's master_weights or state_dtype between steps has no effect.",
        "python/ampfuse/optim/_columns.py",
        """\
            if not all([known.adopt_options(group) for known, group in pairs]):
                self._groups = []
""",
        """\
            [known.adopt_options(group) for known, group in pairs]
""",
        "tests/python/optim",
    ),
    Fault(
        "sync_masters_from_model looks only at the masters of the first group.",
        "python/ampfuse/optim/fused.py",
        """\
        for group in self.param_groups:
            for param in group["params"]:
                master = self.state.get(param, {}).get("master_param")
""",
        """\
        for group in self.param_groups[:1]:
            for param in group["params"]:
                master = self.state.get(param, {}).get("master_param")
""",
        "tests/python/optim",
    ),
    Fault(
        "An optimizer shares its step counters with the state dict that it has loaded.",
        "python/ampfuse/optim/_loading.py",
        """entries[name] = step.reshape(()).clone()""",
        """entries[name] = step.reshape(())""",
        "tests/python/optim",
    ),
    Fault(
        "Momentum whose buffer was deleted does not start with the next gradient.",
        "python/ampfuse/optim/_state.py",
        """restarts = bool(missing) and options.first_step_sets_moments""",
        """restarts = False""",
        "tests/python/optim",
    ),
    Fault(
        "Momentum that was loaded from torch's SGD is thrown away by the next step.",
        "python/ampfuse/optim/_adopting.py",
        """entries["step"] = 1.0""",
        """entries["step"] = 0.0""",
        "tests/python/optim",
    ),
    Fault(
        "Under torch.compile the state of all groups is created with the first group's options.",
        "python/ampfuse/optim/_traced.py",
        """\
            of_state = optimizer._rule.state_options(group, optimizer._own_options)
            for param in of_group:
""",
        """\
            group = self.param_groups[0]
            of_state = optimizer._rule.state_options(group, optimizer._own_options)
            for param in of_group:
""",
        "tests/python/optim tests/python/amp",
    ),
    Fault(
        "A group's option write_back_grads is ignored; the constructor's holds for all groups.",
        "python/ampfuse/optim/_columns.py",
        """write_back_grads = option(group, "write_back_grads", own_options)""",
        """write_back_grads = own_options["write_back_grads"]""",
        "tests/python/optim",
    ),
    Fault(
        "A ZeroRedundancyOptimizer accepts a limit over all groups, and clips by a part's norm.",
        "python/ampfuse/optim/_step.py",
        """refuse_limits_in_zero(optimizer, [*limits, optimizer.max_grad_norm])""",
        """refuse_limits_in_zero(optimizer, limits)""",
        "tests/python/optim tests/python/distributed",
    ),
    Fault(
        "Masters of DTensors that the ranks share unevenly are saved with a wrong global shape.",
        "python/ampfuse/gradients/shards.py",
        """\
        tensor.placements,  # type: ignore[attr-defined]
        shape=tensor.shape,
        stride=tensor.stride(),
""",
        """\
        tensor.placements,  # type: ignore[attr-defined]
""",
        "tests/python/optim tests/python/distributed",
    ),
    # --- losses, clipping and gradients ---------------------------------------------------------
    Fault(
        "LinearCrossEntropyLoss ignores its option chunk_classes.",
        "python/ampfuse/losses/linear_cross_entropy.py",
        """\
            chunk_rows=self.chunk_rows,
            chunk_classes=self.chunk_classes,
""",
        """\
            chunk_rows=self.chunk_rows,
""",
        "tests/python/losses",
    ),
    Fault(
        "A denominator that is a number is rounded to float32, for float64 losses too.",
        "python/ampfuse/losses/options.py",
        """_number("denominator", denominator, torch.float64, input)""",
        """_number("denominator", denominator, torch.float32, input)""",
        "tests/python/losses",
    ),
    Fault(
        "accumulate does not count uint8 targets of class 156, which is -100 in uint8.",
        "python/ampfuse/accumulation.py",
        """(target.long() != IGNORED).sum()""",
        """(target != IGNORED).sum()""",
        "tests/python/losses",
    ),
    Fault(
        "Norms from backward count as valid after clip_grad_norm_ has clipped DTensors.",
        "python/ampfuse/clip_grad.py",
        """\
            if is_dtensor(total_norm):  # torch does not count this as a write
                torch.autograd.graph.increment_version(grads)
            return
""",
        """\
            return
""",
        "tests/python/distributed tests/python/optim",
    ),
    Fault(
        "After a backward pass that raised, the next one counts the same gradients twice.",
        "python/ampfuse/distributed/_collector.py",
        """self._pending, self._bytes = {}, 0""",
        """self._bytes = 0""",
        "tests/python/distributed",
    ),
    # --- graphed steps and integrations ---------------------------------------------------------
    Fault(
        "GraphedStep reads a tensor that was assigned to lr once, not at each step.",
        "python/ampfuse/graphed_step/__init__.py",
        """\
                if not isinstance(group["lr"], Tensor):
                    group["lr"] = own
""",
        """\
                group["lr"] = own
""",
        "tests/python/amp",
    ),
    Fault(
        "ScaleMetrics counts all skipped steps again if no update came since the last read.",
        "python/ampfuse/integrations/__init__.py",
        """records[len(records) - new :]""",
        """records[-new:]""",
        "tests/frameworks",
    ),
    # --- moments in 8 bits and averages ---------------------------------------------------------
    Fault(
        "Saved codes have the name of a moment, so torch's class takes them for its numbers.",
        "python/ampfuse/optim/_coded.py",
        '    return f"{moment}_codes", units_name(moment)',
        "    return moment, units_name(moment)",
        "tests/python/optim/test_optim_8bit.py",
    ),
    Fault(
        "Codes that are loaded into a parameter of another memory format keep their old groups.",
        "python/ampfuse/optim/_loading.py",
        "            if is_kept and state[codes].stride() == param.stride():",
        "            if is_kept:",
        "tests/python/optim/test_optim_8bit.py",
    ),
    Fault(
        "A parameter's random numbers depend on which other parameters have gradients.",
        "python/ampfuse/optim/_columns.py",
        "            columns.first_indices = [self._first_indices[index] for index in members]",
        "            columns.first_indices = self._first_indices[: len(members)]",
        "tests/python/optim/test_optim_8bit.py",
    ),
    Fault(
        "An evaluation that fails leaves the averages in place of the weights.",
        "python/ampfuse/optim/_averaged.py",
        "    finally:",
        "    except OSError:\n        raise\n    else:",
        "tests/python/optim/test_optim_averages.py",
    ),
]
