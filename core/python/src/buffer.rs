//! Copies of Python buffers.

use bytemuck::Pod;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

/// The items of a contiguous buffer whose length is a multiple of theirs, in one copy.
///
/// A copy, though reading in place would do while the buffer is held: others may write to it as soon as this thread lets
/// go of the GIL, and a lookup that reads a token twice would then see two. The copy is a small part of a lookup.
pub(crate) fn copied<T: Pod>(buffer: &PyUntypedBuffer, _attached: Python<'_>) -> Vec<T> {
    debug_assert!(buffer.is_c_contiguous() && buffer.len_bytes().is_multiple_of(size_of::<T>()));
    let length = buffer.len_bytes() / size_of::<T>();
    let mut items = Vec::<T>::with_capacity(length);
    if length > 0 {
        // (the address of an empty buffer may be null)
        // SAFETY: the buffer is C-contiguous, so that `len_bytes` bytes stand at its address, and it stays where it is
        // while it is held; they go to memory of our own of that size, in which any bytes are valid items. No Python code
        // writes to the buffer meanwhile, because this thread is attached. Native code that writes to it without the GIL
        // would race with this, as with any `bytes(buffer)`: the copy holds some of both then.
        unsafe {
            std::ptr::copy_nonoverlapping(
                buffer.buf_ptr().cast::<u8>(),
                items.as_mut_ptr().cast::<u8>(),
                length * size_of::<T>(),
            );
            items.set_len(length);
        }
    }
    items
}
