//! What engines publish, and how it reaches the index.

use std::sync::Arc;

use kvsync_index::index::Registered;
use kvsync_index::{Facts, Index};

use crate::random::Random;
use crate::wire::{batch, cleared, removed, stored};

/// Tokens per block.
pub const BLOCK: usize = 16;
/// Blocks of one chain: one long prompt.
const CHAIN: usize = 1_000;
/// The model that all serve.
pub(crate) const MODEL: &str = "model";

/// One payload to one worker: all that knows how this is done.
pub(crate) fn apply(index: &Index, worker: &Registered, payload: &[u8]) {
    assert!(index.change(worker, |worker, shared| worker.apply_payload(shared, payload)), "the worker is registered");
}

/// An index and its workers.
pub struct Engines {
    /// It.
    pub index: Index,
    /// In order of their numbers.
    pub workers: Vec<Arc<Registered>>,
}

impl Engines {
    /// So many workers, empty.
    #[must_use]
    pub fn new(count: usize) -> Self {
        let index = Index::new();
        let names = (0..count).map(|number| format!("worker-{number}"));
        let workers = names
            .map(|name| {
                index.add_worker(&name, MODEL, Facts::default());
                index.worker(&name).expect("added just now")
            })
            .collect();
        Self { index, workers }
    }

    /// Apply all of it.
    pub fn apply(&self, feed: &Feed) {
        for (worker, payload) in &feed.payloads {
            apply(&self.index, &self.workers[*worker], payload);
        }
    }

    /// Empty one worker, as its engine tells it.
    pub fn clear(&self, worker: usize) {
        apply(&self.index, &self.workers[worker], &batch(&[cleared()]));
    }

    /// Blocks of all workers.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.index.describe().iter().map(|(_, worker)| worker.blocks).sum()
    }
}

/// What workers have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Nothing: each has blocks of its own.
    Own,
    /// Everything, under the same hashes (engines with one seed).
    Shared,
    /// Everything, under hashes of each one's own (each engine has its seed).
    Seeded,
}

/// One piece of a chain, at one worker.
#[derive(Debug, Clone)]
struct Run {
    /// The worker's number.
    worker: usize,
    /// What its engine calls the blocks.
    hashes: Vec<u64>,
    /// The block before.
    parent: Option<u64>,
    /// Of all blocks.
    tokens: Vec<u32>,
}

/// Payloads, in order.
#[derive(Debug)]
pub struct Feed {
    /// Each with the number of its worker.
    pub payloads: Vec<(usize, Vec<u8>)>,
    /// Blocks stored in all of them.
    pub blocks: u64,
    /// Blocks that are there afterwards, if all workers were empty before.
    left: u64,
}

impl Feed {
    /// Stores of `blocks` blocks in all, `per_batch` in each, dealt to the workers in turn.
    #[must_use]
    pub fn stores(workers: usize, content: Content, blocks: usize, per_batch: usize) -> Self {
        let runs = runs(workers, content, blocks, per_batch);
        Self::new(runs.iter().map(|run| (run.worker, vec![store(run)])).collect(), blocks, blocks)
    }

    /// What full caches publish: a first feed that fills them, and one that removes a block for each that it stores.
    #[must_use]
    pub fn churn(workers: usize, held: usize, blocks: usize, per_batch: usize) -> [Self; 2] {
        let runs = runs(workers, Content::Own, held + blocks, per_batch);
        let (filling, churning) = runs.split_at(held / per_batch);
        let filled = filling.iter().map(|run| (run.worker, vec![store(run)])).collect();
        let churned = runs.iter().zip(churning).map(|(oldest, run)| {
            assert_eq!(oldest.worker, run.worker);
            let removals = oldest.hashes.iter().map(|hash| removed(*hash));
            (run.worker, removals.chain([store(run)]).collect())
        });
        [Self::new(filled, held, held), Self::new(churned.collect(), blocks, held)]
    }

    fn new(batches: Vec<(usize, Vec<Vec<u8>>)>, blocks: usize, left: usize) -> Self {
        let payloads = batches.into_iter().map(|(worker, events)| (worker, batch(&events))).collect();
        Self { payloads, blocks: blocks as u64, left: left as u64 }
    }

    /// Nothing of it was refused, waits or lacks a key.
    ///
    /// # Panics
    /// Something was.
    pub fn check(&self, engines: &Engines) {
        let workers = engines.index.describe();
        assert_eq!(workers.iter().map(|(_, worker)| worker.placed).sum::<u64>(), self.left);
        assert_eq!(workers.iter().map(|(_, worker)| worker.blocks).sum::<u64>(), self.left);
    }
}

fn store(run: &Run) -> Vec<u8> {
    stored(&run.hashes, run.parent, &run.tokens, BLOCK)
}

/// Chains of a thousand blocks, grown in turn: of a worker's own, or the same for all.
fn runs(workers: usize, content: Content, blocks: usize, per_batch: usize) -> Vec<Run> {
    assert!(blocks.is_multiple_of(workers * per_batch), "all workers have the same number of batches");
    let tells_apart = |worker: usize| if content == Content::Own { worker as u64 } else { 0 };
    let mut tokens: Vec<_> = (0..workers).map(|worker| Random::new(1 + tells_apart(worker))).collect();
    let seed = |worker: usize| if content == Content::Shared { 0 } else { worker as u64 };
    let mut hashes: Vec<_> = (0..workers).map(|worker| Random::new(1_000_000 + seed(worker))).collect();
    let mut parents = vec![None; workers];
    (0..blocks / per_batch)
        .map(|number| {
            let (round, worker) = (number / workers, number % workers);
            let parent = if (round * per_batch).is_multiple_of(CHAIN.next_multiple_of(per_batch)) {
                None
            } else {
                parents[worker]
            };
            let hashes = hashes[worker].numbers(per_batch);
            parents[worker] = hashes.last().copied();
            Run { worker, hashes, parent, tokens: tokens[worker].tokens(per_batch * BLOCK) }
        })
        .collect()
}
