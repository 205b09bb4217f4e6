"""Faults that the tests must find, spread over the subjects, as a diff has them.

A paragraph has the file in the package and what is wrong then, a text that stands there once, what takes its place, and
the test in this folder that must fail: a file, or a node id. ``slow`` stands before what ``make test`` leaves out.
These tests are as few as will do, so that all faults are tried in minutes. No fault makes ranks wait for each other.
"""

import re
from typing import NamedTuple


class Fault(NamedTuple):
    """A change of one line."""

    file: str
    name: str
    old: str
    new: str
    slow: str
    test: str


_TEXT = r"""
core/layout.py: parameters are not aligned
- ends[owners.get(index)] = end = _round_up(end + spec.numel, alignment)
+ ends[owners.get(index)] = end = end + spec.numel
core/test_layout.py

core/layout.py: a bucket grows beyond the cap
- and open_bytes[group] + spec.nbytes > cap_bytes:
+ and open_bytes[group] > cap_bytes:
core/test_layout.py

core/bucket_cap.py: the cap on buckets does not grow with the number of ranks
- best = math.sqrt(model_bytes * in_latency * (ranks + between))
+ best = math.sqrt(model_bytes * in_latency * (2 + between))
core/test_bucket_cap.py

distributed/gradients/clipping.py: a maximum norm passes over NaN
- return torch.where(combined[1] > 0, math.nan, combined[0]).to(dtype)
+ return combined[0].to(dtype)
distributed/gradients/test_norms.py

core/accumulation.py: a short window is divided by the full length
- counted = micro_batches if partial_window == "lightning" else accumulate
+ counted = micro_batches
strategies/gradients/test_steps.py::test_a_step_is_that_of_one_big_batch[alone, short windows, ddp_tuned and zero2]

distributed/engine/reducer.py: an exposed gradient is added to itself
- if bucket.shard_gradient is None or (reduction.unsharded is not None and not reduction.again):
+ if bucket.shard_gradient is None:
strategies/test_parity.py::test_trains_as_the_oracle_does[two heads-late-2]

distributed/engine/reducer.py: sums of float16 overflow before they are divided
- applied = 1.0 / self.collectives.world_size
+ applied = 1.0
strategies/test_zero3_in_16_bits.py::test_gradients_are_summed_in_fp32_whatever_they_travel_in

distributed/engine/buckets.py: a parameter with other data keeps the values of before the step
- for slot in self.slots if self._has_copies else ():
+ for slot in ():
strategies/test_parity.py::test_trains_as_the_oracle_does[traded data-by flag-1]

distributed/engine/buckets.py: unused parameters decay
- if self.shard_gradient is None or self.is_partial or not slot.used:
+ if self.shard_gradient is None or self.is_partial:
slow strategies/test_parity.py::test_trains_as_the_oracle_does[unused-by flag-2]

distributed/engine/reducer.py: sharded accumulation: windows that are cut short or weighted are taken for full ones
- factor = scale() * self.collectives.world_size
+ factor = 1.0
strategies/gradients/test_steps.py::test_a_step_is_that_of_one_big_batch[alone, short windows, ddp_tuned and zero2]

distributed/engine/buckets.py: sharded accumulation: micro-batches add up in 16 bits
- narrow = self.shard_dtype in (torch.float16, torch.bfloat16)
+ narrow = False
strategies/test_zero3_in_16_bits.py::test_gradients_are_summed_in_fp32_whatever_they_travel_in

strategies/gradients/observers.py: sharded accumulation: who clears gradients between micro-batches is not seen
- _CLEARS = {"zero_grad"}
+ _CLEARS = set()
strategies/test_sharded_accumulation.py

distributed/engine/gatherer.py: a copy is made of a parameter in flight
- *_attributes(_ASKS),
+ *_attributes(f"clone {_ASKS}"),
distributed/engine/test_read_guard.py

distributed/comm/collectives.py: sums are passed on from the wrong place
- part.shard: source[part.start - had[shard] : part.stop - had[shard]]
+ part.shard: source[: part.stop - part.start]
distributed/comm/test_carriers.py::test_sums_and_gathers_are_right

distributed/engine/planning.py: a resumed training sends its buckets in another order
- in_turn = dict.fromkeys([*order, *reversed(self._names.values())])
+ in_turn = dict.fromkeys(reversed(self._names.values()))
strategies/test_gradient_order.py::test_buckets_stay_if_an_optimizer_has_state

core/layout.py: buckets of matrices wait for those of all other parameters
- groups = sorted(group_by_cap(parameters, policy.bucket_cap_bytes), key=lambda members: members[-1])
+ groups = sorted(group_by_cap(parameters, policy.bucket_cap_bytes), key=lambda one: parameters[one[0]].partition)
core/test_layout.py

distributed/engine/buckets.py: master weights are rounded in every step
- take_where_changed(self.master, self.shard, self._rounded(self.master))
+ self.master.copy_(self.shard)
strategies/test_master_weights.py

distributed/gradients/clipping.py: every rank counts what all ranks have
- counts_replicated = collectives is None or collectives.rank == 0
+ counts_replicated = True
strategies/test_parity.py::test_trains_as_the_oracle_does[memory shared without being tied-small buckets-2]

strategies/gradients/clipping.py: a norm that overflows is taken for gradients that do
- return self._on_any_rank(largest)
+ return True
slow strategies/gradients/test_nonfinite.py::test_all_ranks_raise_and_training_can_start_again[large squares, ddp_tuned and zero2]

strategies/gradients/clipping.py: a rank whose norm is finite does not hear of the others
- return is_nonfinite if measured.is_agreed else any_rank(is_nonfinite, self._control)
+ return is_nonfinite
strategies/gradients/test_nonfinite.py::test_what_hooks_repair_is_stepped_with_and_what_one_makes_nan_is_left_out_on_all

distributed/gradients/loss_weights.py: a rank knows of its own weights alone
- summed = self._messages.latest().weights
+ summed = self._for_message()
strategies/gradients/test_steps.py::test_a_step_is_that_of_one_big_batch[no weight, zero1 and zero3]

distributed/gradients/loss_weights.py: a loss without weight brings its NaN along
- if float(self._window[micro_batch]) == 0 and not look.is_finite():
+ if False:
strategies/gradients/test_steps.py::test_nan_of_a_micro_batch_without_weight_is_an_error_on_all_ranks

distributed/comm/liveness.py: calls at different points of a training are mixed up
- if self._store.compare_set(f"{call}/point", "", point or "-").decode() != (point or "-"):
+ if False:
distributed/comm/test_liveness.py::test_a_call_that_not_all_ranks_make_mixes_nothing_up

strategies/launch/waits.py: a rank that was stopped is said to be where it last was
- if sign.silent and not sign.ended:
+ if False:
strategies/test_waits.py::test_the_line_names_who_is_not_there

strategies/launch/waits.py: a rank that waits in DDP's backward is silent
- return any(self.launched.get(group, 0) < number for group, number in other.launched.items())
+ return False
strategies/test_waits.py::test_a_rank_that_waits_in_training_says_for_whom[ddp_tuned-sleeps]

distributed/engine/state.py: state is gathered into the wrong place
- .storage_order(state[position][key])[elements]
+ .storage_order(state[position][key])[: elements.stop - elements.start]
strategies/checkpoint/test_routes.py::test_a_file_is_what_ddp_writes_and_a_folder_holds_the_same

distributed/comm/collectives.py: each group of ranks sums the gradients of its own alone
- sum_in_order(of_holders, total)
+ total.copy_(own)
slow strategies/test_parity.py::test_trains_as_the_oracle_does[clip by norm-groups-4]

distributed/gradients/clipping.py: every group of ranks adds its shards to the norm
- counts_own = collectives is None or collectives.place.copy == 0
+ counts_own = True
slow strategies/test_parity.py::test_trains_as_the_oracle_does[clip by norm-groups-4]

distributed/engine/buckets.py: a rank loads the part of another
- part = self.storage_order(unsharded)[self.shard_slice.elements]
+ part = self.storage_order(unsharded)[: self.shard_slice.numel]
strategies/checkpoint/test_routes.py::test_training_goes_on_as_if_it_had_not_stopped

distributed/checkpoint/reading.py: a rank reads the part of another from a sharded checkpoint
- runs[name] = Run(cut.own.start, part)
+ runs[name] = Run(0, part)
strategies/checkpoint/test_routes.py::test_training_goes_on_as_if_it_had_not_stopped

distributed/fsdp/writes.py: values that torch forgets are not noticed
- untyped_storage() is not storage
+ untyped_storage() is None
slow strategies/test_parity.py::test_what_cannot_be_trained_says_so[shards: data set at the end-zero3-2]

strategies/zero3.py: a checkpoint is not loaded into a module that was made on the meta device
- if self._loads_after_setup is None:
+ if True:
strategies/test_zero3.py::test_a_checkpoint_is_loaded_on_all_ranks

distributed/durable_files.py: what a crash between two renames left is lost
- if not os.path.lexists(path) and os.path.lexists(replaced):
+ if False:
distributed/test_durable_files.py

strategies/checkpoint/resume.py: all ranks go on with the random numbers of one
- return ranks[self._ranks.data_rank] if
+ return ranks[0] if
strategies/data/test_positions.py::test_a_training_goes_on_as_if_it_had_not_stopped[any hook]

distributed/gradients/clipping.py: a shard that several copies hold is counted by each
- return rank in mesh.mesh
+ return True
strategies/test_tensor_parallel.py::test_trains_as_one_process_does[sgd, clipped-4]

distributed/fsdp/tensor_layers.py: between cut layers all ranks draw the same
- seed = digest(b"".join([str(dist.get_rank()).encode(),
+ seed = digest(b"".join([
strategies/test_tensor_parallel.py::test_between_cut_layers_each_rank_drops_other_features

strategies/data/same_data.py: metrics count ranks that share layers twice
- metric.dist_sync_fn = _GatherOfData(self)
+ pass
strategies/test_tensor_parallel.py::test_what_one_process_has[metrics]

distributed/pipeline/holders.py: what several stages use is not summed
- dist.all_reduce(gradient, group=group)
+ pass
strategies/test_pipeline.py::test_trains_as_one_process_does[1f1b-2]

distributed/pipeline/cut_module.py: a recomputation calls blocks of other stages
- output = run.returned(number)
+ output = forward(*args, **kwargs)
strategies/test_pipeline.py::test_trains_as_one_process_does[recomputed-3]

distributed/pipeline/cut_module.py: a loss may be made of what another stage computes
- if any(isinstance(tensor, FakeTensor) for _, tensor in leaves(tree)):
+ if False:
strategies/test_pipeline.py::test_what_cannot_be_cut_is_an_error_on_all_ranks[skip]

distributed/comm/means.py: groups take the sum of how far they have moved
- buffer[rank] = own.div_(ranks)
+ buffer[rank] = own
strategies/test_meetings.py::test_groups_train_as_written_out[sgd-2-1]

strategies/meetings.py: all groups resume with the first one's optimizer state
- if number == 0 or len(others) + 1 != self._groups.copies:
+ if number >= 0 or len(others) + 1 != self._groups.copies:
strategies/test_meetings.py::test_a_resumed_training_ends_with_the_same_bits[2-1]

distributed/engine/outer_steps.py: a resumed training forgets the momentum
- slot.view_into_shard(momentum).copy_(slot.part_of(loaded))
+ slot.view_into_shard(momentum).zero_()
strategies/test_meetings.py::test_a_resumed_training_ends_with_the_same_bits[2-1]

distributed/pipeline/schedule.py: each stage of a rank counts in a metric
- keeps=stage == self.own[-1],
+ keeps=True,
strategies/test_pipeline.py::test_code_before_the_blocks_counts_once_on_a_rank[interleaved]

strategies/pipeline.py: the norm is that of a stage
- return found._replace(counted=counted_here, device=self.root_device, collectives=collectives)
+ return found
strategies/test_pipeline.py::test_trains_as_one_process_does[accumulated-2]

strategies/pipeline.py: gradients of the first step are not reduced over pipelines
- slot.fresh = slot.parameter.grad is not None
+ pass
strategies/test_pipeline.py::test_trains_as_one_process_does[sgd in pipelines-4]

strategies/pipeline.py: the ranks of a pipeline count as ranks with other data
- lambda: scale() * ranks)
+ lambda: scale())
strategies/test_pipeline.py::test_trains_as_one_process_does[sgd in pipelines-4]

strategies/pipeline.py: what is in no block is not averaged over pipelines
- self._held.average_outer(self._same_data.data_group)
+ pass
slow strategies/test_pipeline.py::test_trains_as_one_process_does[sharded-4]

strategies/ddp.py: a new reducer forgets the communication hook
- register_comm_hook(ddp, self._comm_hook)
+ pass
strategies/test_trained_parameters.py::test_what_is_trained_is_averaged[compressed]

distributed/ddp/trained_parameters.py: what is unfrozen in training is not averaged
- chosen = self._fired & self._hooks.keys()
+ chosen = set()
strategies/test_trained_parameters.py::test_what_is_trained_is_averaged

strategies/data/even.py: an epoch of ranks with different numbers of batches is one batch short
- islice(batches, max(0, least - batches_before(batches))), least)
+ islice(batches, max(0, least - 1 - batches_before(batches))), least - 1)
strategies/test_dataloaders.py::test_all_ranks_train_on_the_smallest_number_of_batches

strategies/data/places.py: a loader goes on with what its workers have prefetched
- batches = batches if given
+ batches = batches + 1 if given
strategies/data/test_positions.py::test_a_training_goes_on_as_if_it_had_not_stopped[next sample]

strategies/data/samplers.py: the rest of an epoch is drawn from other random numbers
- set_rng_state(begin["rng"])
+ pass
strategies/data/test_positions.py::test_a_training_goes_on_as_if_it_had_not_stopped[next sample]

strategies/data/samplers.py: an epoch goes on with other samples than those that were drawn
- return compared.hexdigest() == str(position["digest"])
+ return True
strategies/data/test_positions.py::test_an_order_that_cannot_be_drawn_again_begins_anew_on_all_ranks

strategies/data/samplers.py: among other ranks the epoch begins with what was trained on
- left = left_of_turns(parts, taken, whole)
+ left = left_of_turns(parts, [0] * len(parts), whole)
strategies/data/test_positions.py::test_among_other_ranks_every_sample_that_is_left_comes_once

strategies/checkpoint/preemption.py: a preempted training loses the window it is in
- accumulates = window_is_open(trainer)
+ accumulates = False
strategies/checkpoint/test_preemption.py::test_all_ranks_save_after_the_same_batch_and_end

strategies/gradients/observers.py: hooks of the other package's base classes are taken for a user's
- "pytorch_lightning.",
+ "pytorch_lightning_",
test_namespaces.py::test_an_unmodified_program_trains_as_its_ddp_does[forked]

pytorch_lightning.py: imports within functions are not renamed
- _with_renamed_imports(one) if isinstance(one, CodeType) else one for one in
+ one for one in
test_namespaces.py::test_one_of_the_two_packages_is_enough[pytorch_lightning]

distributed/comm/work.py: gradients are reduced before they are ready on another stream
- if current != self._launching:
+ if current is None:
distributed/comm/test_streams.py

distributed/engine/compiled_code.py: compiled blocks are called before their parameters have arrived
- wait_for_parameters_in(part)
+ pass
strategies/test_late_parameters.py

distributed/durable_files.py: a name comes before content
- sync(temporary)
+ pass
distributed/test_durable_files.py

strategies/zero1.py: ranks begin differently
- broadcast_module(self
+ (self
strategies/test_realistic_trainings.py::test_ends_where_ddp_ends[GPT-zero1_custom-32-true-2]

distributed/fsdp/sharding.py: shards begin differently
- broadcast_tensors((tensor for tensor in tensors if tensor not in left), group)
+ pass
strategies/test_realistic_trainings.py::test_ends_where_ddp_ends[ResNet-zero3_custom-bf16-mixed-2]

strategies/zero1.py: setting up draws a random number
- self.node_rank,
+ self.node_rank + int(__import__('torch').rand(())),
strategies/test_realistic_trainings.py::test_ends_where_ddp_ends[GPT-zero1_custom-32-true-2]

"""  # noqa: E501  (of tests with long names)
_PARAGRAPH = re.compile(r"(\S+): (.+)\n- (.+)\n\+ (.+)\n(slow )?(.+)")


def _fault(paragraph: str) -> Fault:
    found = _PARAGRAPH.fullmatch(paragraph)
    assert found is not None, paragraph
    return Fault(*found.groups(default=""))


FAULTS = [_fault(paragraph) for paragraph in _TEXT.strip().split("\n\n")]
