//! A bound on bytes: it is kept, and costs no more blocks than it must.

use kvsync_index::event::{Adapter, EngineHash, Event, Run, Stored, Tier};
use kvsync_index::{Bounds, Facts, Index};

const BLOCKS: u64 = 64;
const BYTES: u64 = 16 << 20;

fn chain(number: u64) -> Event<'static> {
    let first = number * BLOCKS;
    Event::Stored(Stored {
        run: Run {
            hashes: (first..first + BLOCKS).map(EngineHash::Unsigned).collect(),
            parent: None,
            tokens: (first as u32..(first + BLOCKS) as u32).collect(),
            block_size: 1,
            adapter: Adapter::None,
            extra_keys: Some(vec![vec![]; BLOCKS as usize]),
        },
        tier: Some(Tier::Gpu),
        group: 0,
        kind: None,
        window: None,
    })
}

#[test]
fn memory_near_its_bound_is_used_again_and_an_eighth_of_it_goes_at_a_time() {
    let index = Index::bounded(Bounds { blocks: None, bytes: Some(BYTES) });
    index.add_worker("w", "m", Facts::default());
    let (mut before, mut cuts) = (0, 0);
    for number in 0..20_000 {
        index.change_named("w", |worker, shared| worker.apply(shared, None, [chain(number)]));
        assert!(index.bytes() <= BYTES, "{} bytes, with {number} chains", index.bytes());
        let blocks = index.describe()[0].1.blocks;
        if blocks < before {
            cuts += 1;
            assert!(blocks * 3 > before * 2, "{before} blocks became {blocks}");
        }
        before = blocks;
    }
    assert!(cuts > 3, "{cuts}");
    assert!(before * 32 > BYTES / 2, "{before} blocks at the end");
}
