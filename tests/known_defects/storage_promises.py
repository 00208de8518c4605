"""Mutations of the storage contract, and the tests that must find them."""

from __future__ import annotations

from tests.known_defects.mutants import Mutation

STORAGE_MUTATIONS = [
    Mutation(  # publish folder fsync
        "store/test_storage_contract.py::test_the_bytes_are_durable_before_the_name_and_the_name_before_the_return[publish]",
        "store/posix.py",
        "            _fsync_folder(os.path.dirname(self._path))\n        self._finish()",
        "        self._finish()",
    ),
    Mutation(  # publish file fsync
        "store/test_storage_contract.py::test_the_bytes_are_durable_before_the_name_and_the_name_before_the_return[publish]",
        "store/posix.py",
        "            os.fsync(self._descriptor)\n",
        "",
    ),
    Mutation(  # publish no truncate
        "store/test_posix_storage.py::test_an_object_is_invisible_until_it_is_published",
        "store/posix.py",
        "            os.ftruncate(self._descriptor, nbytes)\n",
        "",
    ),
    Mutation(  # publish taken silently
        "store/test_posix_storage.py::test_publishing_under_a_taken_key_is_refused_and_changes_nothing",
        "store/posix.py",
        "            if not _give_name(self._temporary, self._path):\n                raise",
        "            if not _give_name(self._temporary, self._path) and not self._path:\n                raise",
    ),
    Mutation(  # create folder fsync
        "store/test_storage_contract.py::test_the_bytes_are_durable_before_the_name_and_the_name_before_the_return[create]",
        "store/posix.py",
        "                _fsync_folder(os.path.dirname(path))\n            finally",
        "            finally",
    ),
    Mutation(  # create file fsync
        "store/test_storage_contract.py::test_the_bytes_are_durable_before_the_name_and_the_name_before_the_return[create]",
        "store/posix.py",
        "                    os.fsync(file.fileno())\n",
        "",
    ),
    Mutation(  # create always true
        "store/test_posix_storage.py::test_an_object_is_never_replaced",
        "store/posix.py",
        "        return created\n",
        "        return True\n",
    ),
    Mutation(  # create leaves temporary
        "store/test_posix_storage.py::test_one_of_32_racing_creators_wins",
        "store/posix.py",
        "            finally:\n                _remove(temporary)\n        return created",
        "            finally:\n                pass\n        return created",
    ),
    Mutation(  # give name replaces
        "store/test_posix_storage.py::test_an_object_is_never_replaced",
        "store/posix.py",
        "        os.link(temporary, path)\n",
        "        os.replace(temporary, path)\n",
    ),
    Mutation(  # give name own success
        "store/test_storage_contract.py::test_a_link_that_was_made_and_then_refused_was_made[create]",
        "store/posix.py",
        "        return os.path.samestat(os.lstat(temporary), os.lstat(path))\n",
        "        return False\n",
    ),
    Mutation(  # give name no fallback
        "store/test_storage_contract.py::test_without_links_an_object_gets_its_name_by_a_rename_that_never_replaces",
        "store/posix.py",
        "        if error.errno not in _UNSUPPORTED:\n            raise\n    try:",
        "        raise\n    try:",
    ),
    Mutation(  # delete not durable
        "store/test_storage_contract.py::test_a_deletion_is_durable_on_return",
        "store/posix.py",
        "                return False\n            _fsync_folder(parent)\n",
        "                return False\n",
    ),
    Mutation(  # delete missing true
        "store/test_storage_contract.py::test_a_deletion_is_durable_on_return",
        "store/posix.py",
        "            except _MISSING:\n                return False\n            _fsync_folder",
        "            except _MISSING:\n                return True\n            _fsync_folder",
    ),
    Mutation(  # delete keeps folder
        "store/test_storage_contract.py::test_with_its_last_object_the_folder_of_a_checkpoint_goes_and_no_other",
        "store/posix.py",
        "                os.rmdir(parent)\n",
        "                pass\n",
    ),
    Mutation(  # delete top folder
        "store/test_storage_contract.py::test_with_its_last_object_the_folder_of_a_checkpoint_goes_and_no_other",
        "store/posix.py",
        '        if "/" in folder:\n',
        "        if folder:\n",
    ),
    Mutation(  # list shows temporaries
        "store/test_posix_storage.py::test_a_listing_is_sorted_and_leaves_out_what_is_unpublished",
        "store/posix.py",
        "return sorted(name for name in _names(self._folder(folder)) if not name.startswith(TEMPORARY_PREFIX))",
        "return sorted(_names(self._folder(folder)))",
    ),
    Mutation(  # list unsorted
        "store/test_posix_storage.py::test_a_listing_is_sorted_and_leaves_out_what_is_unpublished",
        "store/posix.py",
        "return sorted(name for name in _names(self._folder(folder)) if not",
        "return builtins.list(name for name in _names(self._folder(folder)) if not",
    ),
    Mutation(  # leftovers any age
        "store/test_storage_contract.py::test_leftovers_are_those_of_a_folder_that_nobody_has_written_to_for_so_long",
        "store/posix.py",
        "return seconds <= 0 or os.stat(path).st_mtime <= time.time() - seconds",
        "return seconds <= 0 or os.stat(path).st_mtime <= time.time()",
    ),
    Mutation(  # read no limit
        "store/test_storage_contract.py::test_an_object_that_is_larger_than_it_can_be_is_not_read",
        "store/posix.py",
        "            if limit is not None and found > limit:\n",
        "            if limit is not None and found < 0:\n",
    ),
    Mutation(  # read short silently
        "store/test_posix_storage.py::test_a_ranged_read_beyond_the_end_is_corruption",
        "store/posix.py",
        "        if nbytes is not None and len(data) < nbytes:\n",
        "        if nbytes is not None and len(data) < 0:\n",
    ),
    Mutation(  # nbytes of folder
        "store/test_posix_storage.py::test_what_is_missing_is_not_found_and_named",
        "store/posix.py",
        "return status.st_size if stat.S_ISREG(status.st_mode) else None",
        "return status.st_size",
    ),
    Mutation(  # parents not synced
        "store/test_posix_storage.py::test_new_folders_are_durable_before_their_first_object_is_announced",
        "store/posix.py",
        "        try:\n            _fsync_folder(parent)\n        except PermissionError:",
        "        try:\n"
        "            if not existed:\n"
        "                _fsync_folder(parent)\n"
        "        except PermissionError:",
    ),
    Mutation(  # folder cache stale
        "store/test_posix_storage.py::test_a_folder_that_was_deleted_is_made_again",
        "store/posix.py",
        "        if folder in self._durable_folders and os.path.isdir(folder):\n",
        "        if folder in self._durable_folders:\n",
    ),
    Mutation(  # parents need rights
        "store/test_storage_contract.py::test_above_a_root_that_is_there_no_rights_are_needed_and_below_it_they_are",
        "store/posix.py",
        "            if below_root or not existed:\n                raise",
        "            raise",
    ),
    Mutation(  # writer no reserve
        "store/test_posix_storage.py::test_a_full_disk_is_reported_when_writing_begins",
        "store/posix.py",
        "                reserve(descriptor, nbytes + -nbytes % ALIGNMENT)\n",
        "",
    ),
    Mutation(  # write once
        "faults/test_storage_faults.py::test_a_store_that_transfers_less_than_it_is_told_is_asked_again",
        "store/posix.py",
        "            offset += num_written\n            data = data[num_written:]",
        "            break",
    ),
    Mutation(  # write zero forever
        "faults/test_storage_faults.py::test_a_store_that_takes_nothing_is_broken",
        "store/posix.py",
        "            if num_written == 0:\n"
        '                raise OSError(errno.EIO, "the file system wrote no bytes and reported no error")\n',
        "            if num_written == 0:\n                break\n",
    ),
    Mutation(  # direct refused raises
        "store/test_storage_contract.py::test_direct_transfers_that_are_refused_go_through_the_page_cache",
        "store/posix.py",
        "        if error.errno != errno.EINVAL:\n            raise error\n",
        "        raise error\n",
    ),
    Mutation(  # folder fsync einval
        "store/test_storage_contract.py::test_a_folder_that_knows_no_fsync_is_no_error_and_one_that_fails_is[22-False]",
        "store/posix.py",
        "        if error.errno != errno.EINVAL:\n            raise\n    finally",
        "        raise\n    finally",
    ),
    Mutation(  # folder fsync error dropped
        "store/test_storage_contract.py::test_a_folder_that_knows_no_fsync_is_no_error_and_one_that_fails_is[5-True]",
        "store/posix.py",
        "        if error.errno != errno.EINVAL:\n            raise\n    finally",
        "        if error.errno == errno.EBADF:\n            raise\n    finally",
    ),
    Mutation(  # direct last block
        "store/test_posix_storage.py::test_any_range_is_read_exactly_and_beyond_the_end_is_corruption",
        "store/posix.py",
        "            out[whole:num_read] = bytearray(block[: num_read - whole])\n",
        "            out[whole:num_read] = 0\n",
    ),
    Mutation(  # abort leaves temporary
        "store/test_posix_storage.py::test_abort_leaves_nothing_and_does_nothing_after_publish",
        "store/posix.py",
        "        with suppress(OSError):\n            self.close()\n        _remove(self._temporary)",
        "        with suppress(OSError):\n            self.close()",
    ),
    Mutation(  # writer error leaves temporary
        "store/test_storage_contract.py::test_a_writer_that_could_not_be_made_leaves_nothing",
        "store/posix.py",
        "                os.close(descriptor)\n                _remove(self._temporary)\n                raise",
        "                os.close(descriptor)\n                raise",
    ),
    Mutation(  # path dots
        "store/test_posix_storage.py::test_keys_that_are_not_plain_relative_names_are_refused[..]",
        "store/posix.py",
        'if name in ("", ".", "..") or',
        'if name in ("", ".") or',
    ),
    Mutation(  # linux rename replaces
        "store/test_posix_storage.py::test_a_rename_that_never_replaces_stands_in_for_links",
        "store/linux.py",
        "names[1], _RENAME_NOREPLACE)",
        "names[1], 0)",
    ),
    Mutation(  # memory short
        "store/test_storage_contract.py::test_memory_that_ends_too_early_is_corruption[7]",
        "store/memory.py",
        "        if offset + len(out) > self.nbytes:\n",
        "        if offset > self.nbytes:\n",
    ),
    Mutation(  # memory start
        "store/test_storage_contract.py::test_memory_is_read_like_any_storage",
        "store/memory.py",
        "        reader.read_at(start, out)\n",
        "        reader.read_at(0, out)\n",
    ),
    Mutation(  # memory missing nbytes
        "store/test_storage_contract.py::test_memory_is_read_like_any_storage",
        "store/memory.py",
        "return None if data is None else data.nbytes",
        "return 0 if data is None else data.nbytes",
    ),
    Mutation(  # memory create silent
        "store/test_storage_contract.py::test_memory_that_is_shown_as_a_storage_is_not_changed[<lambda>0]",
        "store/memory.py",
        "    def create(self, key: str, data: bytes) -> NoReturn:\n"
        '        """Raises `StorageError`."""\n'
        "        raise self._read_only(key)",
        "    def create(self, key: str, data: bytes) -> bool:\n"
        '        """Raises `StorageError`."""\n'
        "        return True",
    ),
    Mutation(  # memory missing reader
        "store/test_storage_contract.py::test_memory_is_read_like_any_storage",
        "store/memory.py",
        "        if key not in self._objects:\n            raise NotFoundError",
        "        if key not in self._objects and not key:\n            raise NotFoundError",
    ),
    Mutation(  # memory list
        "store/test_storage_contract.py::test_memory_is_read_like_any_storage",
        "store/memory.py",
        "return [] if folder else sorted(self._objects)",
        "return []",
    ),
    Mutation(  # timed writer too late
        "store/test_storage_contract.py::test_a_file_that_is_opened_too_late_is_dropped[writer]",
        "store/timed.py",
        "begin, too_late=lambda late: late.abort())",
        "begin)",
    ),
    Mutation(  # timed reader too late
        "store/test_storage_contract.py::test_a_file_that_is_opened_too_late_is_dropped[reader]",
        "store/timed.py",
        "begin, too_late=lambda late: late.close())",
        "begin)",
    ),
    Mutation(  # timed drop at once
        "store/test_storage_contract.py::test_a_file_stays_open_until_the_request_that_hangs_has_ended[read_at]",
        "store/timed.py",
        "            wait(self._abandoned)\n",
        "",
    ),
    Mutation(  # timed run goes on
        "store/test_storage_contract.py::test_what_was_given_up_is_stopped_and_asks_for_nothing_more",
        "store/timed.py",
        "                self.give_up()\n",
        "",
    ),
    Mutation(  # timed run no stop
        "store/test_storage_contract.py::test_what_was_given_up_is_stopped_and_asks_for_nothing_more",
        "store/timed.py",
        "                stop()\n",
        "",
    ),
    Mutation(  # timed not retryable
        "io/test_io.py::test_a_write_that_hangs_is_given_up_and_cleared_away_when_it_ends[write_at]",
        "store/timed.py",
        "            retryable=True,\n",
        "",
    ),
    Mutation(  # timed helpers stay
        "store/test_storage_contract.py::test_a_file_that_is_opened_too_late_is_dropped[writer]",
        "store/helpers.py",
        "            if self._closed:\n                self._dismiss()",
        "",
    ),
    Mutation(  # timed close keeps helpers
        "io/test_io.py::test_a_timed_store_answers_as_the_store_does",
        "store/helpers.py",
        "        self._closed = True\n        self._dismiss()",
        "        self._closed = True",
    ),
    Mutation(  # timed idle holds
        "store/test_storage_contract.py::test_an_idle_helper_holds_nothing_of_what_it_did",
        "store/helpers.py",
        "            del work, tell  # an idle helper must not hold buffers\n",
        "",
    ),
    Mutation(  # timed given up ignored
        "store/test_storage_contract.py::test_what_was_given_up_is_stopped_and_asks_for_nothing_more",
        "store/timed.py",
        "        if self._given_up or time.monotonic() > self._end_s:",
        "        if time.monotonic() > self._end_s:",
    ),
    Mutation(  # timed end ignored
        "io/test_io.py::test_when_the_time_is_up_a_store_is_not_asked_any_more",
        "store/timed.py",
        "        if self._given_up or time.monotonic() > self._end_s:",
        "        if self._given_up:",
    ),
    Mutation(  # timed direct unchecked
        "store/test_storage_contract.py::test_no_direct_request_begins_when_the_time_is_up",
        "store/timed.py",
        "    def write_at(self, offset: int, *data: Bytes) -> None:\n        self._check()\n",
        "    def write_at(self, offset: int, *data: Bytes) -> None:\n",
    ),
    Mutation(  # timed direct publish unchecked
        "store/test_storage_contract.py::test_no_direct_request_begins_when_the_time_is_up",
        "store/timed.py",
        "    def publish(self, nbytes: int) -> None:\n        self._check()\n",
        "    def publish(self, nbytes: int) -> None:\n",
    ),
    Mutation(  # timed direct read unchecked
        "store/test_storage_contract.py::test_no_direct_request_begins_when_the_time_is_up",
        "store/timed.py",
        "    def read_at(self, offset: int, out: Bytes) -> None:\n        self._check()\n",
        "    def read_at(self, offset: int, out: Bytes) -> None:\n",
    ),
    Mutation(  # timed own timeout
        "store/test_storage_contract.py::test_a_time_out_of_the_store_itself_is_told_as_it_is",
        "store/timed.py",
        "            if request.done():  # meanwhile, or with an error of this kind\n"
        "                return request.result()\n",
        "",
    ),
    Mutation(  # timed not daemon
        "io/test_io.py::test_a_store_that_hangs_keeps_no_process_alive",
        "store/helpers.py",
        'name="holdfast-helper", daemon=True)',
        'name="holdfast-helper")',
    ),
    Mutation(  # timed waits for end
        "store/test_storage_contract.py::test_a_file_stays_open_until_the_request_that_hangs_has_ended[read_at]",
        "store/timed.py",
        "            return request.result(max(self._end_s - time.monotonic(), 0))",
        "            return request.result(None)",
    ),
    Mutation(  # removal looks only before its notice
        "run/test_removal_races.py::test_a_pin_either_holds_or_fails",
        "run/removal.py",
        "        check_removable(run, place)\n        check_in_time()\n",
        "        check_in_time()\n",
    ),
    Mutation(  # removal does not look for readers again
        "run/test_removal_races.py::test_a_reader_with_a_lease_finds_all_files_until_it_ends",
        "run/removal.py",
        "    check_unread(run.storage, place)\n    run.storage.delete",
        "    run.storage.delete",
    ),
    Mutation(  # a removal deletes files that others refer to
        "run/test_reference_races.py::test_no_committed_checkpoint_ever_lacks_bytes[False-remove_both]",
        "run/removal.py",
        "    are_needed = any(map(fmt.is_still_name, names)) and folder in needed_folders(run)\n",
        "    are_needed = False\n",
    ),
    Mutation(  # a save does not look for the tombstone of what it refers to
        "run/test_reference_races.py::test_no_committed_checkpoint_ever_lacks_bytes[False-remove_holder]",
        "run/references.py",
        "not run.is_removed(head.place) and ",
        "",
    ),
    Mutation(  # a pin does not wait for an announced removal
        "run/test_removal_races.py::test_a_pin_either_holds_or_fails",
        "run/pins.py",
        "    await_removals(run.storage, commit.place)\n",
        "",
    ),
    Mutation(  # an epoch does not wait for an announced removal
        "run/test_pins.py::test_a_rollback_waits_for_an_announced_removal",
        "run/history.py",
        "            await_removals(self.storage, opened_from)\n",
        "            pass\n",
    ),
    Mutation(  # a commit does not end the count of the jobs that resumed
        "checkpointer/test_restart_loops.py::test_a_commit_ends_the_count",
        "run/resumes.py",
        "if each.newest_epoch >= committed)\n",
        "if each.newest_epoch >= 0)\n",
    ),
    Mutation(  # a resume leaves no record
        "checkpointer/test_restart_loops.py::test_all_ranks_know_the_count_and_are_refused_alike",
        "run/resumes.py",
        "            run.storage.create(key, records.encode(resume))\n",
        "",
    ),
    Mutation(  # one node alone puts a checkpoint into quarantine
        "run/test_quarantine.py::test_damage_that_one_node_alone_sees_puts_nothing_into_quarantine",
        "run/second_reading.py",
        '        if not _is_damaged(run, place, damage.path or ""):\n            return False\n',
        "",
    ),
    Mutation(  # a damaged checkpoint counts as the newest whole one
        "run/test_quarantine.py::test_it_is_not_the_newest_whole_checkpoint",
        "run/retention.py",
        "[commit for commit in lineage if commit.place not in shut]",
        "lineage",
    ),
    Mutation(  # parts of the newest epoch are deleted
        "run/test_cut_off_saves.py::test_what_the_newest_epoch_has_under_way_stays",
        "run/uncommitted.py",
        "if place.epoch >= epoch or is_known",
        "if place.epoch > epoch or is_known",
    ),
    Mutation(  # whole checkpoints without a commit are deleted
        "run/test_cut_off_saves.py::test_a_save_of_an_older_epoch_that_lacks_only_its_commit_stays_and_the_doctor_commits_it",
        "run/uncommitted.py",
        "        return bool(missing_files(self._run.storage, stored))\n",
        "        return True\n",
    ),
    Mutation(  # parts are deleted without a record
        "run/test_cut_off_saves.py::test_a_fenced_rank_that_writes_its_file_meanwhile_commits_a_whole_checkpoint_or_is_told",
        "run/removal.py",
        "    created = not exists and run.storage.create(key, records.encode(Abandoned(checkpoint=folder)))\n"
        "    if not created and",
        "    created = not exists\n    if not created and",
    ),
    Mutation(  # ordered bytes that changed behind their digests
        "io/test_in_order.py::test_memory_that_changes_while_it_is_written_is_an_error_and_no_file",
        "io/ordered.py",
        "            if expected is not None and found[chunk] != expected[at : at + len(found[chunk])]:\n",
        "            if expected is not None and not found[chunk]:\n",
    ),
    Mutation(  # ordered bytes that changed back and forth
        "jobs/test_object_runs.py::test_a_tensor_that_is_changed_and_changed_back_while_it_is_uploaded_is_an_error",
        "saving/shares.py",
        "        if versions.changed():\n",
        "        if versions is None:\n",
    ),
    Mutation(  # ordered bytes hashed after they were sent in place, without digests to compare
        "io/test_in_order.py::test_memory_behind_a_head_that_is_known_is_copied_before_it_is_written_and_hashed",
        "io/ordered.py",
        "            if expected is None:\n",
        '            if expected == b"":\n',
    ),
    Mutation(  # bytes of another place, from the request that is under way
        "store/test_object_store.py::test_reads_elsewhere_and_of_other_threads_have_requests_of_their_own",
        "store/objects.py",
        "body.at != offset or ",
        "",
    ),
]
