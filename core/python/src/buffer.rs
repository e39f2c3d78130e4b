//! Bytes of Python buffers.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

/// A copy of a contiguous buffer's bytes.
pub(crate) fn copied(buffer: &PyUntypedBuffer, _attached: Python<'_>) -> Vec<u8> {
    debug_assert!(buffer.is_c_contiguous());
    if buffer.len_bytes() == 0 {
        return Vec::new(); // its address may be null
    }
    // SAFETY: the buffer is C-contiguous, so that `len_bytes` bytes stand at its address, and it stays where it is while
    // it is held. Python code can't write to it meanwhile, because this thread is attached.
    unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) }.to_vec()
}
