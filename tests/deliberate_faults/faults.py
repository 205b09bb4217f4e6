"""Faults that the tests must find, spread over the subjects: a line of the package, and what is put in its place.

Each old text stands once in its file. ``tests`` are node ids, or files, of which at least one must fail; they are as
few as will do, so that all faults are tried in minutes. None of these faults makes ranks wait for each other.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of one line.

    Attributes:
        name: What is wrong then.
        file: In the package.
        old: A part of one line that stands in the file once.
        new: What takes its place.
        tests: Which find it.
        slow: Whether only ``make test-slow`` finds it, not ``make test``.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    slow: bool = False


_REAL = "tests/strategies/test_realistic_trainings.py::test_ends_where_ddp_ends"
_OF_ZERO1, _OF_ZERO3 = (f"{_REAL}[GPT-zero1_custom-32-true-2]",), (f"{_REAL}[ResNet-zero3_custom-bf16-mixed-2]",)
_DURABLE = ("tests/distributed/test_durable_files.py",)
_NONFINITE = "tests/strategies/gradients/test_nonfinite.py"
_PARITY = "tests/strategies/test_parity.py::test_trains_as_the_oracle_does"

FAULTS = (
    Fault(
        "parameters are not aligned",
        "core/layout.py",
        "offset = _round_up(end, alignment)",
        "offset = end",
        ("tests/core/test_layout.py",),
    ),
    Fault(
        "a rank owns what lies behind a parameter",
        "core/layout.py",
        "first, last = max(start, slot.offset), min(stop, slot.offset + slot.numel)",
        "first, last = max(start, slot.offset), stop",
        ("tests/core/test_layout.py",),
    ),
    Fault(
        "a bucket grows beyond the cap",
        "core/layout.py",
        "and open_bytes[group] + spec.nbytes > cap_bytes:",
        "and open_bytes[group] > cap_bytes:",
        ("tests/core/test_layout.py",),
    ),
    Fault(
        "the cap on buckets does not grow with the number of ranks",
        "core/bucket_cap.py",
        "return in_latency * (ranks + between)",
        "return in_latency * (2 + between)",
        ("tests/core/test_bucket_cap.py",),
    ),
    Fault(
        "a maximum norm passes over NaN",
        "core/norms.py",
        "return torch.where(combined[1] > 0, math.nan, combined[0]).to(dtype)",
        "return combined[0].to(dtype)",
        ("tests/core/test_norms.py",),
    ),
    Fault(
        "a short window is divided by the full length",
        "core/accumulation.py",
        'counted = accumulate if partial_window == "lightning" else micro_batches',
        "counted = accumulate",
        ("tests/core/test_accumulation.py",),
    ),
    Fault(
        "what was sent stays, and is sent again by the next backward",
        "distributed/engine/buckets.py",
        "slot.parameter.grad = None",
        "pass",
        ("tests/distributed/engine/test_reducer.py::test_repeated_backward_adds_up",),
    ),
    Fault(
        "an exposed gradient is added to itself",
        "distributed/engine/reducer.py",
        "if bucket.shard_gradient is None or reduction.shown is ShownMean.TO_PACK:",
        "if bucket.shard_gradient is None:",
        (f"{_PARITY}[two heads-late-2]",),
    ),
    Fault(
        "sums of float16 overflow before they are divided",
        "distributed/engine/reducer.py",
        "applied = 1.0 / self.collectives.world_size",
        "applied = 1.0",
        ("tests/distributed/engine/test_precision.py::test_a_mean_in_float16_is_found_where_the_sum_is_too_large",),
    ),
    Fault(
        "gradients that come after their bucket has left stay behind",
        "distributed/engine/reducer.py",
        "left_over = [bucket in with_left and bucket not in waiting for bucket in self.buckets]",
        "left_over = [False for bucket in self.buckets]",
        ("tests/distributed/engine/test_reducer.py::test_a_backward_that_was_not_announced_is_reduced_too",),
    ),
    Fault(
        "one rank alone hands through what is as narrow as its wire",
        "distributed/engine/buckets.py",
        "if sends_nothing and buffer.dtype == kept_in:",
        "if sends_nothing:",
        ("tests/distributed/engine/test_precision.py::test_trains_as_by_hand[1]",),
    ),
    Fault(
        "unused parameters decay",
        "distributed/engine/buckets.py",
        "if self.shard_gradient is None or self.is_partial or not slot.used:",
        "if self.shard_gradient is None or self.is_partial:",
        (f"{_PARITY}[unused-by flag-2]",),
        slow=True,
    ),
    Fault(
        "sharded accumulation: windows that are cut short or weighted are taken for full ones",
        "distributed/engine/reducer.py",
        "factor = scale() * self.collectives.world_size",
        "factor = 1.0",
        ("tests/distributed/engine/test_sharded_accumulation.py::test_windows_equal_those_of_one_process",),
    ),
    Fault(
        "sharded accumulation: micro-batches add up in 16 bits",
        "distributed/engine/buckets.py",
        "narrow = self.shard_dtype in (torch.float16, torch.bfloat16)",
        "narrow = False",
        ("tests/distributed/engine/test_sharded_accumulation.py::test_16_bits_add_up_in_32",),
    ),
    Fault(
        "sharded accumulation: who clears gradients between micro-batches is not seen",
        "strategies/gradients/observers.py",
        '_CLEARS = {"zero_grad"}',
        "_CLEARS = set()",
        ("tests/strategies/test_sharded_accumulation.py",),
    ),
    Fault(
        "a copy is made of a parameter in flight",
        "distributed/engine/gatherer.py",
        "Tensor.is_contiguous,",
        "Tensor.is_contiguous, Tensor.clone,",
        ("tests/distributed/engine/test_read_guard.py",),
    ),
    Fault(
        "sums are passed on from the wrong place",
        "distributed/comm/collectives.py",
        "part.shard: source[part.start - had[shard] : part.stop - had[shard]]",
        "part.shard: source[: part.stop - part.start]",
        ("tests/distributed/comm/test_carriers.py::test_sums_and_gathers_are_right_and_sent_as_counted",),
    ),
    Fault(
        "a resumed training sends its buckets in another order",
        "distributed/engine/planning.py",
        "in_turn = dict.fromkeys([*order, *reversed(self._names.values())])",
        "in_turn = dict.fromkeys(reversed(self._names.values()))",
        ("tests/distributed/engine/test_plans.py::test_a_known_order_of_gradients_is_followed",),
    ),
    Fault(
        "buckets of matrices wait for those of all other parameters",
        "distributed/engine/planning.py",
        "sorted(planned, key=lambda one: one[0])",
        "planned",
        ("tests/distributed/engine/test_plans.py::test_buckets_are_in_the_reverse_order_of_registration_and_stay",),
    ),
    Fault(
        "master weights are rounded in every step",
        "distributed/engine/buckets.py",
        "take_where_changed(self.master, self.shard, self._rounded(self.master))",
        "self.master.copy_(self.shard)",
        ("tests/distributed/engine/test_precision.py::test_updates_too_small_for_16_bits_add_up",),
    ),
    Fault(
        "every rank counts what all ranks have",
        "distributed/gradients/clipping.py",
        "counts_replicated = collectives is None or collectives.rank == 0",
        "counts_replicated = True",
        ("tests/distributed/gradients/test_clipping.py",),
    ),
    Fault(
        "a norm that overflows is taken for gradients that do",
        "strategies/gradients/clipping.py",
        "return self._on_any_rank(largest)",
        "return True",
        (f"{_NONFINITE}::test_all_ranks_raise_and_training_can_start_again[large squares, ddp_tuned and zero2]",),
        slow=True,
    ),
    Fault(
        "a rank whose norm is finite does not hear of the others",
        "strategies/gradients/clipping.py",
        "return is_nonfinite if measured.is_agreed else any_rank(is_nonfinite, self._control)",
        "return is_nonfinite",
        (f"{_NONFINITE}::test_what_hooks_repair_is_stepped_with_and_what_one_makes_nan_is_left_out_on_all",),
    ),
    Fault(
        "a rank knows of its own weights alone",
        "distributed/gradients/loss_weights.py",
        "return self._messages.latest().weights",
        "return self._of_window()",
        ("tests/distributed/gradients/test_loss_weights.py",),
    ),
    Fault(
        "a loss without weight brings its NaN along",
        "distributed/gradients/loss_weights.py",
        "if float(self._window[micro_batch]) == 0 and not look.is_finite():",
        "if False:",
        ("tests/distributed/gradients/test_loss_weights.py::test_gradients_without_weight_must_be_finite",),
    ),
    Fault(
        "calls at different points of a training are mixed up",
        "distributed/comm/liveness.py",
        'if self._store.compare_set(f"{call}/point", "", point or "-").decode() != (point or "-"):',
        "if False:",
        ("tests/distributed/comm/test_liveness.py::test_a_call_that_not_all_ranks_make_mixes_nothing_up",),
    ),
    Fault(
        "a rank that was stopped is said to be where it last was",
        "strategies/launch/waits.py",
        "if sign.silent and not sign.ended:",
        "if False:",
        ("tests/strategies/test_waits.py::test_the_line_names_who_is_not_there",),
    ),
    Fault(
        "a rank counts as waiting in what it has not launched",
        "strategies/launch/waits.py",
        "sign.waits or any(other.is_behind",
        "sign.waits or all(other.is_behind",
        ("tests/strategies/test_waits.py::test_the_line_names_who_is_not_there",),
    ),
    Fault(
        "a rank that waits in DDP's backward is silent",
        "strategies/launch/waits.py",
        "return any(self.launched.get(group, 0) < number for group, number in other.launched.items())",
        "return False",
        ("tests/strategies/test_waits.py::test_a_rank_that_waits_in_training_says_for_whom[ddp_tuned-sleeps]",),
    ),
    Fault(
        "state is gathered into the wrong place",
        "distributed/engine/state.py",
        "[part.start : part.start + part.numel].copy_(place)",
        "[: part.numel].copy_(place)",
        ("tests/strategies/checkpoint/test_routes.py::test_a_file_is_what_ddp_writes_and_a_folder_holds_the_same",),
    ),
    Fault(
        "each group of ranks sums the gradients of its own alone",
        "distributed/comm/collectives.py",
        "sum_in_order(of_holders, total)",
        "total.copy_(own)",
        ("tests/distributed/engine/test_shard_groups.py::test_trains_as_one_group_does_and_copies_stay_alike",),
    ),
    Fault(
        "every group of ranks adds its shards to the norm",
        "distributed/gradients/clipping.py",
        "counts_own = collectives is None or collectives.place.copy == 0",
        "counts_own = True",
        ("tests/distributed/gradients/test_clipping.py",),
    ),
    Fault(
        "a rank loads the part of another",
        "distributed/engine/buckets.py",
        "part = self.storage_order(unsharded)[self.shard_slice.elements]",
        "part = self.storage_order(unsharded)[: self.shard_slice.numel]",
        ("tests/strategies/checkpoint/test_routes.py::test_training_goes_on_as_if_it_had_not_stopped",),
    ),
    Fault(
        "a rank reads the part of another from a sharded checkpoint",
        "distributed/checkpoint/reading.py",
        "runs[source.name] = Run(part, cut.own.start)",
        "runs[source.name] = Run(part, 0)",
        ("tests/strategies/checkpoint/test_routes.py::test_training_goes_on_as_if_it_had_not_stopped",),
    ),
    Fault(
        "a rank takes the rows of a sharded parameter for others",
        "distributed/fsdp/cuts.py",
        "begin = min(dist.get_rank() * length, numel)",
        "begin = 0",
        ("tests/distributed/fsdp/test_cuts.py",),
    ),
    Fault(
        "values that torch forgets are not noticed",
        "distributed/fsdp/sharded_module.py",
        "untyped_storage() is not storage",
        "untyped_storage() is None",
        ("tests/strategies/test_parity.py::test_what_cannot_be_trained_says_so[shards: data set at the end-zero3-2]",),
        slow=True,
    ),
    Fault(
        "a checkpoint is not loaded into a module that was made on the meta device",
        "strategies/zero3.py",
        "self._loads_after_setup = self.restore_checkpoint_after_setup",
        "self._loads_after_setup = None",
        ("tests/strategies/test_zero3.py::test_a_checkpoint_is_loaded_on_all_ranks",),
    ),
    Fault(
        "what a crash between two renames left is lost",
        "distributed/durable_files.py",
        "if not os.path.lexists(path) and os.path.lexists(replaced):",
        "if False:",
        ("tests/distributed/test_durable_files.py",),
    ),
    Fault(
        "all ranks go on with the random numbers of one",
        "strategies/checkpoint/resume.py",
        'of_ranks[rank]["rng"]',
        'of_ranks[0]["rng"]',
        ("tests/strategies/data/test_positions.py::test_a_training_goes_on_as_if_it_had_not_stopped[any hook]",),
    ),
    Fault(
        "a new reducer forgets the communication hook",
        "strategies/ddp.py",
        "register_comm_hook(ddp, self._comm_hook)",
        "pass",
        ("tests/strategies/test_trained_parameters.py::test_what_is_trained_is_averaged[compressed]",),
    ),
    Fault(
        "what is unfrozen in training is not averaged",
        "distributed/ddp/trained_parameters.py",
        "chosen = self._fired & self._hooks.keys()",
        "chosen = set()",
        ("tests/strategies/test_trained_parameters.py::test_what_is_trained_is_averaged",),
    ),
    Fault(
        "an epoch of ranks with different numbers of batches is one batch short",
        "strategies/data/even.py",
        "return _Even(dataloader, control, least)",
        "return _Even(dataloader, control, least - 1)",
        ("tests/strategies/test_dataloaders.py::test_all_ranks_train_on_the_smallest_number_of_batches",),
    ),
    Fault(
        "a loader goes on with what its workers have prefetched",
        "strategies/data/positions.py",
        "else batches_handed_out(batches), has_ended",
        "else batches_handed_out(batches) + 1, has_ended",
        ("tests/strategies/data/test_positions.py::test_a_training_goes_on_as_if_it_had_not_stopped[next sample]",),
    ),
    Fault(
        "the rest of an epoch is drawn from other random numbers",
        "strategies/data/samplers.py",
        'set_rng_state(begin["rng"])',
        "pass",
        ("tests/strategies/data/test_positions.py::test_a_training_goes_on_as_if_it_had_not_stopped[next sample]",),
    ),
    Fault(
        "an epoch goes on with other samples than those that were drawn",
        "strategies/data/samplers.py",
        "if not is_same:",
        "if False:",
        ("tests/strategies/data/test_positions.py::test_an_order_that_cannot_be_drawn_again_begins_anew_on_all_ranks",),
    ),
    Fault(
        "among other ranks the epoch begins with what was trained on",
        "strategies/data/samplers.py",
        'return left_of_turns(parts, [position["taken"] for position in positions], whole)',
        "return left_of_turns(parts, [0] * of, whole)",
        ("tests/strategies/data/test_positions.py::test_among_other_ranks_every_sample_that_is_left_comes_once",),
    ),
    Fault(
        "a preempted training loses the window it is in",
        "strategies/checkpoint/preemption.py",
        "accumulates = window_is_open(trainer)",
        "accumulates = False",
        ("tests/strategies/checkpoint/test_preemption.py::test_all_ranks_save_after_the_same_batch_and_end",),
    ),
    Fault(
        "hooks of the other package's base classes are taken for a user's",
        "strategies/gradients/observers.py",
        '"pytorch_lightning.",',
        '"pytorch_lightning_",',
        ("tests/test_namespaces.py::test_a_trainer_of_the_other_package_trains_as_its_ddp_does[forked]",),
    ),
    Fault(
        "imports within functions are not renamed",
        "pytorch_lightning.py",
        "_with_renamed_imports(one) if isinstance(one, CodeType) else one for one in",
        "one for one in",
        ("tests/test_namespaces.py::test_one_of_the_two_packages_is_enough[pytorch_lightning]",),
    ),
    Fault(
        "gradients are reduced before they are ready on another stream",
        "distributed/comm/work.py",
        "if current != self._launching:",
        "if current is None:",
        ("tests/distributed/comm/test_streams.py",),
    ),
    Fault(
        "compiled blocks are called before their parameters have arrived",
        "distributed/engine/compiled_code.py",
        "    wait_for_parameters_in(part)",
        "    pass",
        ("tests/strategies/test_late_parameters.py",),
    ),
    Fault(
        "buckets of GPUs are as small as those of CPUs",
        "core/bucket_cap.py",
        'smallest = _SMALLEST_CAP if device_type == "cpu" else _SMALLEST_CAP_OF_GPUS',
        "smallest = _SMALLEST_CAP",
        ("tests/core/test_bucket_cap.py",),
    ),
    Fault("rings carry less", "core/shard_groups.py", "> 2 *", "> 3 *", ("tests/core/test_shard_groups.py",)),
    Fault("a name comes before content", "distributed/durable_files.py", "sync(temporary)", "pass", _DURABLE),
    Fault("ranks begin differently", "strategies/zero1.py", "broadcast_module(self", "(self", _OF_ZERO1),
    Fault("shards begin differently", "distributed/fsdp/sharding.py", "broadcast_tensors(t", "(t", _OF_ZERO3),
    Fault(
        "setting up draws a random number",
        "strategies/zero1.py",
        "node = Node(socket.gethostname(), self.node_rank)",
        "node = Node(socket.gethostname(), self.node_rank + int(__import__('torch').rand(())))",
        _OF_ZERO1,
    ),
)
