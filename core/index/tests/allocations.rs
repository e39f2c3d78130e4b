//! What the index asks of an allocator: nothing for which glibc would leave holes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvsync_index::event::{Adapter, EngineHash, Event, Removed, Run, Stored, Tier};
use kvsync_index::{Facts, Index};

thread_local! {
    /// The largest alignment that this thread asked for.
    static MOST: Cell<usize> = const { Cell::new(0) };
}

struct Watching;

// SAFETY: it is the system's allocator
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        MOST.set(MOST.get().max(layout.align()));
        // SAFETY: what holds for this call holds for that one
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: what holds for this call holds for that one
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

#[test]
fn no_memory_is_asked_to_be_aligned() {
    MOST.set(0);
    let index = Index::new();
    // the second one has names of its own for what the first one has
    for (worker, first) in [("a", 0), ("b", 1 << 60)] {
        index.add_worker(worker, "m", Facts::default());
        let registered = index.worker(worker).expect("it is registered");
        let names = (first..first + 40_000).map(EngineHash::Unsigned);
        let stored = Event::Stored(Stored {
            run: Run {
                hashes: names.clone().collect(),
                parent: None,
                tokens: (0..40_000).collect(),
                block_size: 1,
                adapter: Adapter::None,
                extra_keys: None,
            },
            tier: Some(Tier::Gpu),
            group: 0,
            kind: None,
            window: None,
        });
        let removed = names.skip(1_000).collect();
        let removed =
            Event::Removed(Removed { hashes: removed, tier: Some(Tier::Gpu), group: Some(0), remaining: None });
        for event in [stored, removed] {
            index.change(&registered, |worker, shared| worker.apply(shared, None, [event]));
        }
    }
    let most = MOST.get();
    assert!(most <= align_of::<u128>(), "memory was asked for that is aligned to {most} bytes");
}
