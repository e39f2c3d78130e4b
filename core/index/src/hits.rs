//! How many blocks of a prompt an engine's cache can serve: the rule of each kind of KV-cache group.
//!
//! * full attention: the longest unbroken run from the first block;
//! * sliding window: the longest prefix whose last ceil((window − 1) / block size) blocks are held, fewer only where they
//!   reach the prompt's start;
//! * state (Mamba): the longest prefix whose one last block is held;
//! * chunked local attention: blocks before the chunk in which the next token lies are not needed; from there on the
//!   unbroken run counts.
//!
//! The rules reproduce vLLM's own answers on captured streams; a kind without a proven rule gets no credit.

/// The rule that a group follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Full attention, MLA and the like.
    Full,
    /// Sliding window.
    Window,
    /// Recurrent state.
    State,
    /// Chunked local attention.
    Chunked,
    /// No rule is proven.
    Unproven,
}

impl Kind {
    /// The kind that a `kv_cache_spec_kind` means.
    #[must_use]
    pub fn of_spec(spec: &str) -> Self {
        match spec {
            "full_attention" | "mla_attention" | "sink_full_attention" => Self::Full,
            "sliding_window" | "sliding_window_mla" => Self::Window,
            "mamba" => Self::State,
            "chunked_local_attention" => Self::Chunked,
            _ => Self::Unproven,
        }
    }
}

/// One group's part in a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// The group's number.
    pub group: i64,
    /// Its kind.
    pub kind: Kind,
    /// [`Kind::Window`]: the attention window in tokens, at least 1.
    pub window: u64,
}

/// The prompt and what is known of the engine.
#[derive(Debug, Clone, Copy)]
pub struct Question {
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Tokens per block, at least 1.
    pub block_size: u64,
    /// The model's `attention_chunk_size`, at least 1.
    pub chunk: u64,
    /// EAGLE or MTP: the engine drops the last block of the hit, and a window needs one block more.
    pub eagle: bool,
}

impl Question {
    /// Blocks that can hit at most: the engine always computes the last token itself.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.tokens.saturating_sub(1) / self.block_size
    }

    /// Blocks that the engine serves of so many that it finds.
    #[must_use]
    pub fn served(&self, found: u64) -> u64 {
        if self.eagle { found.saturating_sub(1) } else { found }
    }
}

/// Says what a worker holds; rules are named by their place among all.
pub trait Held {
    /// Does the group of a rule hold a block?
    fn held(&mut self, rule: usize, block: u64) -> bool;

    /// The end of the unbroken run from `start`, at most `limit`.
    fn unbroken(&mut self, rule: usize, start: u64, limit: u64) -> u64 {
        let mut at = start;
        while at < limit && self.held(rule, at) {
            at += 1;
        }
        at
    }
}

impl<F: FnMut(usize, u64) -> bool> Held for F {
    fn held(&mut self, rule: usize, block: u64) -> bool {
        self(rule, block)
    }
}

/// Blocks of the prompt that every group can serve together.
pub fn hit_blocks(rules: &[Rule], question: Question, mut held: impl Held) -> u64 {
    let of_kind = |kind| rules.iter().enumerate().filter(move |(_, rule)| rule.kind == kind);
    let limit = question.limit();
    let mut run = limit;
    for (at, _) in of_kind(Kind::Full) {
        run = held.unbroken(at, 0, run);
    }
    if of_kind(Kind::Chunked).next().is_some() {
        let reach = if run == limit { question.tokens.saturating_sub(1) } else { run * question.block_size };
        let start = (reach / question.chunk * question.chunk / question.block_size).min(run);
        for (at, _) in of_kind(Kind::Chunked) {
            run = held.unbroken(at, start, run);
        }
    }
    loop {
        let before = run;
        for (at, rule) in rules.iter().enumerate() {
            if rule.kind == Kind::Window {
                let need = (rule.window - 1).div_ceil(question.block_size) + u64::from(question.eagle);
                run = windowed(run, need, |block| held.held(at, block));
            } else if rule.kind == Kind::State {
                while run > 0 && !held.held(at, run - 1) {
                    run -= 1;
                }
            }
        }
        if run == before || run == 0 {
            break;
        }
    }
    question.served(run)
}

/// The longest prefix of at most `run` blocks whose last `need` blocks are held.
fn windowed(mut run: u64, need: u64, mut held: impl FnMut(u64) -> bool) -> u64 {
    let mut at = run;
    while at > run.saturating_sub(need) {
        at -= 1;
        if !held(at) {
            run = at; // every longer prefix down to here has this block in its window
        }
    }
    run
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    /// Tries every length and asks the rules word for word.
    fn by_force(rules: &[Rule], question: Question, held: &HashSet<(usize, u64)>) -> u64 {
        let has = |at: usize, block: u64| held.contains(&(at, block));
        let limit = question.limit();
        let served = |length: u64| {
            rules.iter().enumerate().all(|(at, rule)| match rule.kind {
                Kind::Full => (0..length).all(|block| has(at, block)),
                Kind::Window => {
                    let need = (rule.window - 1).div_ceil(question.block_size) + u64::from(question.eagle);
                    (length.saturating_sub(need)..length).all(|block| has(at, block))
                }
                Kind::State => length == 0 || has(at, length - 1),
                Kind::Chunked | Kind::Unproven => unreachable!(),
            })
        };
        let best = (0..=limit).rev().find(|&length| served(length)).unwrap_or(0);
        if question.eagle { best.saturating_sub(1) } else { best }
    }

    fn rules() -> impl Strategy<Value = Vec<Rule>> {
        let rule = (prop_oneof![Just(Kind::Full), Just(Kind::Window), Just(Kind::State)], 1u64..12)
            .prop_map(|(kind, window)| Rule { group: 0, kind, window });
        prop::collection::vec(rule, 1..4)
    }

    proptest! {
        #[test]
        fn equals_trying_every_length(
            rules in rules(),
            held in prop::collection::hash_set((0usize..4, 0u64..8), 0..32),
            tokens in 0u64..20,
            block_size in 1u64..4,
            eagle: bool,
        ) {
            let question = Question { tokens, block_size, chunk: 1, eagle };
            let found = hit_blocks(&rules, question, |at: usize, block: u64| held.contains(&(at, block)));
            prop_assert_eq!(found, by_force(&rules, question, &held));
        }
    }

    #[test]
    fn chunked_needs_only_the_chunk_of_the_next_token() {
        let rules = [Rule { group: 0, kind: Kind::Chunked, window: 0 }];
        let question = Question { tokens: 17, block_size: 4, chunk: 8, eagle: false };
        assert_eq!(hit_blocks(&rules, question, |_: usize, _: u64| false), 4); // the next token opens a chunk
        let question = Question { tokens: 16, ..question };
        assert_eq!(hit_blocks(&rules, question, |_: usize, block: u64| block != 2), 2);
        assert_eq!(hit_blocks(&rules, question, |_: usize, block: u64| block == 2), 3);
    }

    #[test]
    fn absurd_figures_overflow_nothing() {
        let rules = [
            Rule { group: 0, kind: Kind::Window, window: u64::MAX },
            Rule { group: 1, kind: Kind::Chunked, window: 0 },
        ];
        let question = Question { tokens: u64::from(u32::MAX), block_size: 1 << 31, chunk: u64::MAX, eagle: true };
        assert_eq!(hit_blocks(&rules, question, |_: usize, _: u64| true), 0);
    }
}
