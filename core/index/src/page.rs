//! A slice that begins at a cache line, in memory that was asked for like any other.
//!
//! The allocator is not asked to align it: glibc cuts what is to be aligned out of a larger piece, and what is freed of
//! such pieces is too small for the next one. Where they come and go, holes stay that nothing fills.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// What every allocator aligns to without being asked.
const ALIGN: usize = align_of::<usize>();

/// Some items whose number never changes.
pub(crate) struct Page<T> {
    first: NonNull<T>,
    len: u32,
    /// Bytes of its memory before the first item.
    before: u32,
}

impl<T: Copy> Page<T> {
    /// Copies of an item.
    pub(crate) fn new(len: usize, item: T) -> Self {
        let layout = Self::layout(len);
        // SAFETY: it is not of size 0, as there is room for more than the items
        let memory = NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        let before = memory.align_offset(align_of::<T>());
        // SAFETY: it is aligned to `ALIGN`, so `before` is at most what there is room for beside the items
        let first = unsafe { memory.add(before) }.cast::<T>();
        for at in 0..len {
            // SAFETY: there is room for `len` items from the first one on, where an item may stand
            unsafe { first.add(at).write(item) };
        }
        Self { first, len: len as u32, before: before as u32 }
    }
}

impl<T> Page<T> {
    /// Bytes of memory that it takes.
    pub(crate) fn bytes(&self) -> usize {
        Self::layout(self.len()).size()
    }

    fn layout(len: usize) -> Layout {
        const { assert!(align_of::<T>() > ALIGN, "it is a boxed slice otherwise") }
        let room = len.checked_mul(size_of::<T>()).and_then(|items| items.checked_add(align_of::<T>() - ALIGN));
        room.and_then(|room| Layout::from_size_align(room, ALIGN).ok()).expect("no page is as large as all memory")
    }
}

impl<T> Drop for Page<T> {
    fn drop(&mut self) {
        // the items are `Copy`: nothing else is to be dropped
        let layout = Self::layout(self.len());
        // SAFETY: there its memory began, which was allocated with this layout
        unsafe { dealloc(self.first.as_ptr().cast::<u8>().sub(self.before as usize), layout) };
    }
}

impl<T> Deref for Page<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: so many items were written there, and are its own
        unsafe { NonNull::slice_from_raw_parts(self.first, self.len as usize).as_ref() }
    }
}

impl<T> DerefMut for Page<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: so many items were written there, and are its own
        unsafe { NonNull::slice_from_raw_parts(self.first, self.len as usize).as_mut() }
    }
}

impl<T: fmt::Debug> fmt::Debug for Page<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

// SAFETY: it owns its items, as a box does
unsafe impl<T: Send> Send for Page<T> {}
// SAFETY: it gives out no more than a box does
unsafe impl<T: Sync> Sync for Page<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq)]
    #[repr(align(64))]
    struct Line(u64);

    #[test]
    fn items_begin_at_a_line_wherever_the_memory_does() {
        for len in [0, 1, 3, 64] {
            // sizes of several kinds between them: their memory begins all over the place
            let mut pages: Vec<_> = (0..50).map(|n| (vec![0_u8; n * 24], Page::new(len, Line(n as u64)))).collect();
            pages.remove(20);
            for (n, (_, page)) in pages.iter_mut().enumerate() {
                assert_eq!(page.as_ptr().align_offset(64), 0);
                assert!(page.len() == len && page.iter().all(|line| line.0 >= n as u64));
                page.iter_mut().for_each(|line| line.0 = 7);
                assert_eq!(**page, vec![Line(7); len]);
            }
            assert_eq!(pages[0].1.bytes(), 64 * len + 64 - ALIGN);
        }
    }
}
