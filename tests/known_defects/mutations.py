"""Defects to be brought into the library, and the tests that must find them."""

from __future__ import annotations

from tests.known_defects.mutants import Mutation

MUTATIONS = [
    Mutation(  # digests are computed and not compared
        "known_defects/test_wrong_bytes.py::test_a_flipped_bit_loads_silently",
        "io/chunks.py",
        "        if bad:\n            raise self._on_corrupt(file, bad[0])\n",
        "",
    ),
    Mutation(  # a data file is taken for the right one because it is sound in itself
        "known_defects/test_wrong_bytes.py::test_files_of_two_saves_load_as_one_checkpoint",
        "checkpoint/stored_checkpoint.py",
        "        if self.digests.hex(table) != self.seal.files[index].digest:\n",
        "        if not table:\n",
    ),
    Mutation(  # optimizer state is made in the dtype of its parameter
        "known_defects/test_wrong_bytes.py::test_moments_are_rounded_to_the_dtype_of_the_weight",
        "state/bind_tensors.py",
        "        return empty(dtype, stored.shape, like=like, device=device)\n\n",
        '        return empty(str(getattr(like, "dtype", None)).removeprefix("torch."), stored.shape, like=like, '
        "device=device)\n\n",
    ),
    Mutation(  # copies that differ are not told
        "known_defects/test_wrong_bytes.py::test_of_two_ranks_different_state_under_one_name_an_arbitrary_one_survives",
        "agreement/undeclared_copies.py",
        "        if len(groups) > 1:\n",
        "        if len(groups) > 2:\n",
    ),
    Mutation(  # strict in one direction only
        "known_defects/test_partial_loads.py::test_a_tensor_that_the_checkpoint_lacks_keeps_what_it_had",
        "loading/compared_names.py",
        "if strict and (missing or unexpected):",
        "if strict and unexpected:",
    ),
    Mutation(
        "known_defects/test_partial_loads.py::test_buffers_are_not_saved",
        "frameworks/module.py",
        "            if buffer is not None and name not in transient:\n",
        "            if buffer is None and name not in transient:\n",
    ),
    Mutation(
        "known_defects/test_layouts.py::test_strided_shards_get_the_rows_of_others",
        "plan/placements.py",
        "    for chunk in _chunk(intervals, placement.split_factor):\n",
        "    for chunk in _chunk(intervals, 1):\n",
    ),
    Mutation(  # a plan fits whatever the state has become
        "known_defects/test_layouts.py::test_a_plan_that_does_not_fit_any_more_is_used_again",
        "agreement/planner.py",
        "        planned = memory is not None and memory.layouts == self._layouts()\n",
        "        planned = memory is not None\n",
    ),
    Mutation(
        "known_defects/test_crash_and_commit.py::test_folders_are_never_made_durable",
        "store/posix.py",
        "        os.fsync(descriptor)\n    except OSError as error:\n",
        "        os.fstat(descriptor)\n    except OSError as error:\n",
    ),
    Mutation(
        "known_defects/test_crash_and_commit.py::test_the_commit_record_is_not_durable",
        "store/posix.py",
        "                    file.flush()\n                    os.fsync(file.fileno())\n",
        "                    os.fsync(file.fileno())\n                    file.flush()\n",
    ),
    Mutation(  # wrappers are stripped by name
        "known_defects/test_names.py::test_attributes_that_look_like_wrappers_lose_their_names",
        "frameworks/module.py",
        "            inside = prefix if name == traits.wrapped else",
        '            inside = prefix if name in (traits.wrapped, "_orig_mod") else',
    ),
    Mutation(  # a key that is not there at all is no run, so nobody minds
        "known_defects/test_errors_and_hangs.py::test_nodes_that_do_not_share_the_folder_save_a_part_each",
        "saving/shares.py",
        "    if storage.nbytes(key) is None:\n",
        "    if not key:\n",
    ),
]
