//! Prompts, and workers that hold them as far as it is told.

use kvsync_index::{Answer, Observation, Prompt};

use crate::random::Random;
use crate::wire::{batch, removed, stored};
use crate::work::{BLOCK, Engines, MODEL, apply};

/// Blocks of one event.
const RUN: usize = 16;

/// How much of a prompt each worker holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// All of it.
    All,
    /// A part each, evenly spread from nothing to nearly all.
    Part,
    /// Nothing of it, but as much of something else.
    Nothing,
    /// All of it, but half of the blocks went and came back one by one, in another order.
    Churned,
}

/// A prompt, and an index that knows what each worker holds of it.
pub struct Question {
    /// The workers.
    pub engines: Engines,
    tokens: Vec<u32>,
    /// Tokens that all workers together are credited with.
    credit: u64,
}

impl Question {
    /// A prompt of so many blocks and a token more (an engine computes at least one).
    #[must_use]
    pub fn new(blocks: usize, workers: usize, held: Held) -> Self {
        let engines = Engines::new(workers);
        let tokens = Random::new(2).tokens(blocks * BLOCK + 1);
        let others = Random::new(3).tokens(blocks * BLOCK);
        let hashes = Random::new(4).numbers(blocks);
        let mut credit = 0;
        for worker in 0..workers {
            let (content, count) = match held {
                Held::All | Held::Churned => (&tokens, blocks),
                Held::Part => (&tokens, blocks * worker / workers),
                Held::Nothing => (&others, blocks),
            };
            fill(&engines, worker, &hashes[..count], content);
            credit += if held == Held::Nothing { 0 } else { count * BLOCK } as u64;
            if held == Held::Churned {
                churn(&engines, worker, &hashes, &tokens);
            }
        }
        Self { engines, tokens, credit }
    }

    fn prompt(&self) -> Prompt<'_> {
        Prompt { tokens: &self.tokens, model: MODEL, adapter: None, extra: &[], salted: false }
    }

    /// Look it up.
    ///
    /// # Panics
    /// The answer is wrong.
    pub fn ask(&self) {
        let found = self.engines.index.lookup(&self.prompt());
        assert_eq!(found.iter().map(|(_, worker)| worker.credit).sum::<u64>(), self.credit);
    }

    /// The answer of worker 0's engine, which had all that it is credited with, as most have. Meanwhile it evicted a block
    /// of another prompt, as a busy one does: so the credited ones have to be looked at.
    #[must_use]
    pub fn answer(&self) -> Answer {
        let found = self.engines.index.lookup(&self.prompt());
        let (registered, worker) = &found[0];
        let mut random = Random::new(6);
        let other = random.number();
        let events = [stored(&[other], None, &random.tokens(BLOCK), BLOCK), removed(other)];
        apply(&self.engines.index, registered, &batch(&events));
        Answer { cached: worker.credit, credit: worker.credit, as_of: worker.as_of, until: 120.0 }
    }

    /// Take that answer.
    ///
    /// # Panics
    /// It is not found that the credited blocks were held all the time.
    pub fn observe(&self, answer: &Answer) {
        let observation = self.engines.index.observe(self.engines.workers[0].name(), &self.prompt(), answer);
        assert_eq!(observation, Observation::Steady);
    }
}

fn fill(engines: &Engines, worker: usize, hashes: &[u64], tokens: &[u32]) {
    let mut parent = None;
    for (hashes, tokens) in hashes.chunks(RUN).zip(tokens.chunks(RUN * BLOCK)) {
        let tokens = &tokens[..hashes.len() * BLOCK];
        apply(&engines.index, &engines.workers[worker], &batch(&[stored(hashes, parent, tokens, BLOCK)]));
        parent = hashes.last().copied();
    }
}

/// Every second block goes; then they come back, the last one first, between as many blocks of other prompts.
fn churn(engines: &Engines, worker: usize, hashes: &[u64], tokens: &[u32]) {
    let odd: Vec<usize> = (0..hashes.len()).filter(|number| number % 2 == 1).collect();
    for numbers in odd.chunks(RUN) {
        let removals: Vec<_> = numbers.iter().map(|number| removed(hashes[*number])).collect();
        apply(&engines.index, &engines.workers[worker], &batch(&removals));
    }
    let mut random = Random::new(5 + worker as u64);
    for number in odd.into_iter().rev() {
        let back = stored(
            &hashes[number..=number],
            Some(hashes[number - 1]),
            &tokens[number * BLOCK..(number + 1) * BLOCK],
            BLOCK,
        );
        let other = stored(&[random.number()], None, &random.tokens(BLOCK), BLOCK);
        apply(&engines.index, &engines.workers[worker], &batch(&[back, other]));
    }
}
