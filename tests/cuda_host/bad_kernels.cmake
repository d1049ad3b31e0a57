# Each kernel with a mistake must be caught by the named sanitizers, with the given words; their
# correct twins must pass under both sanitizers.

ampfuse_add_cuda_host_executable(bad_kernels SOURCES bad_kernels.cpp)
ampfuse_register_cuda_host_run(good_kernels_asan bad_kernels_asan)
ampfuse_register_cuda_host_run(good_kernels_tsan bad_kernels_tsan)

function(caught kernel sanitizers words)
  foreach(sanitizer ${sanitizers})
    set(test bad_${kernel}_${sanitizer})
    ampfuse_register_cuda_host_run(${test} bad_kernels_${sanitizer} ${kernel})
    set_tests_properties(${test} PROPERTIES
      PASS_REGULAR_EXPRESSION "${words}"
      FAIL_REGULAR_EXPRESSION "finished without complaint")
  endforeach()
endfunction()

caught(out_of_bounds_write asan
       "heap-buffer-overflow.*WRITE of size 4.*in [^\n]*out_of_bounds_write<false>")
# The second stack trace is that of the declaration.
caught(shared_overrun asan
       "heap-buffer-overflow.*in [^\n]*store.*allocated by.*in [^\n]*shared_overrun<false>")
caught(shared_index asan "index 64 out of bounds for type 'float \\[64\\]'")
caught(dynamic_shared_overrun asan "heap-buffer-overflow.*in [^\n]*dynamic_shared_overrun<false>")
caught(stack_overflow asan "stack-overflow.*in [^\n]*recurse")
caught(misaligned_vector asan "misaligned address .* for type 'const struct float4'")
caught(uninitialised_shared "asan;tsan" "wrong result: out\\[32\\] = -?nan")

caught(missing_trailing_barrier tsan "data race .*in [^\n]*missing_trailing_barrier<false>")
caught(inter_block_race tsan "data race .*in [^\n]*inter_block_race<false>")
caught(missing_fence tsan "data race .*in [^\n]*missing_fence<false>")
caught(shuffle_is_no_fence tsan "data race .*in [^\n]*shuffle_is_no_fence<false>")

# These reports of the runtime do not depend on the sanitizer.
caught(divergent_trip_count asan "divergent barrier: 32 threads wait, 32 exited")
caught(barrier_in_branches asan "divergent barrier: threads wait at different lines")
caught(lane_exited "asan;tsan" "lanes that never arrive.*warp 1, lanes 0xffffffdf .*for lanes 0x00000020\n")
caught(lane_elsewhere asan "lanes that never arrive.*lanes 0xffff0000 .*wait in __syncthreads")
caught(mask_without_caller asan "lane 16 of warp 0 is not in its mask, 0x0000ffff")
caught(disagreeing_masks asan "lanes that never arrive.*mask 0xffffffff.*for lanes 0xffff0000")
caught(source_outside_mask asan "reads lane 16, which is not in its mask, 0x0000ffff")
