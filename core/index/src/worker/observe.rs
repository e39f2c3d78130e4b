//! What an answer teaches: its engine said how much of a prompt it had.
//!
//! What it had counts only as long as nothing may have taken it since. So a lookup says where the worker's removals stood
//! ([`Match::as_of`](super::Match)), and the answer brings that back.

use super::lookup::Evidence;
use super::{Trust, Worker};
use crate::counts::Counted;
use crate::event::Tier;
use crate::hits::{Kind, Rule};
use crate::observed::Observed;
use crate::removals::{AsOf, Since};
use crate::shared::Shared;
use crate::trail::Trail;

/// What an engine said it had of a prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Answer {
    /// Tokens that it had.
    pub cached: u64,
    /// Of the match when the worker was chosen.
    pub credit: u64,
    /// Of the same match.
    pub as_of: u64,
    /// When what this teaches ends, by any clock of the caller's, in seconds; not NaN.
    pub until: f64,
}

/// What became of the credited blocks since the match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Observation {
    /// They were held all the time.
    Steady,
    /// One of them, or what is known of the worker, went meanwhile.
    Evicted,
    /// The worker is not registered, serves another model, or has no block size yet.
    Unknown,
}

impl Observation {
    /// The short word for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Steady => "steady",
            Self::Evicted => "evicted",
            Self::Unknown => "unknown",
        }
    }
}

/// The prompt that was answered, at the worker's block size.
#[derive(Debug)]
pub(crate) struct Asked<'c, 'p> {
    /// Its keys.
    pub trail: &'c mut Trail<'p>,
    /// How many tokens it has.
    pub tokens: usize,
    /// Its first block that has extra keys, the salt apart.
    pub first_with_keys: usize,
    /// The request has an adapter or a salt.
    pub named_keys: bool,
}

impl Worker {
    /// Can answers change what is known here?
    pub(crate) fn learns(&self) -> bool {
        self.store.expects() || !self.runs.is_empty() || self.lost
    }

    /// Were the credited blocks held all the time since the match?
    pub(crate) fn judge(&self, asked: &mut Asked<'_, '_>, answer: &Answer) -> Observation {
        match self.since(asked, answer) {
            Some(_) => Observation::Steady,
            None => Observation::Evicted,
        }
    }

    /// Take what an answer teaches.
    pub(crate) fn observe(&mut self, shared: &mut Shared, asked: &mut Asked<'_, '_>, answer: &Answer) -> Observation {
        let since = self.since(asked, answer);
        let rules = self.rules().unwrap_or_default();
        if !rules.is_empty() {
            let had = (answer.cached / u64::from(self.block_size())).min(self.limit(asked)) as usize;
            if let Some(since) = &since {
                self.confirm(&rules, asked, had, since);
            }
            self.miss(shared, &rules, asked, had, answer);
            if let Some(since) = &since {
                self.record(shared, &rules, asked, had, since, answer);
            }
        }
        match since {
            Some(_) => Observation::Steady,
            None => Observation::Evicted,
        }
    }

    /// Blocks of the prompt that can hit at most.
    fn limit(&self, asked: &Asked<'_, '_>) -> u64 {
        self.question(asked.tokens).limit()
    }

    /// The removals since the match; `None` when they may have taken a credited block.
    fn since(&self, asked: &mut Asked<'_, '_>, answer: &Answer) -> Option<Since> {
        let since = self.removals.since(AsOf::unpack(answer.as_of))?;
        let gone =
            since.any_named() && (0..self.credited(asked, answer)).any(|block| since.named(asked.trail.key(block)));
        (!gone).then_some(since)
    }

    /// Blocks that the credit rests on.
    fn credited(&self, asked: &Asked<'_, '_>, answer: &Answer) -> usize {
        let blocks = answer.credit.min(asked.tokens as u64) / u64::from(self.block_size());
        // EAGLE and MTP drop the last block of a hit, but not without having found it
        let credited = if self.facts.eagle && blocks > 0 { (blocks + 1).min(self.limit(asked)) } else { blocks };
        credited as usize
    }

    /// A hit ends doubt: what was served was in the GPU's cache.
    fn confirm(&mut self, rules: &[Rule], asked: &mut Asked<'_, '_>, had: usize, since: &Since) {
        if self.store.doubtful() == 0 || self.trust(Some(rules)) != Trust::Exact {
            return;
        }
        let full = rules.iter().filter(|rule| rule.kind == Kind::Full);
        let places: Vec<_> = full.filter_map(|rule| self.store.place(Tier::Gpu, rule.group)).collect();
        for key in (0..had).map(|block| asked.trail.key(block)) {
            if !since.named(key) {
                places.iter().for_each(|place| self.store.confirm(*place, key));
            }
        }
    }

    /// What the engine did not have, though it was expected, is not there, and no run goes on with it.
    fn miss(&mut self, shared: &mut Shared, rules: &[Rule], asked: &mut Asked<'_, '_>, had: usize, answer: &Answer) {
        if !self.is_plain(rules) || (self.runs.is_empty() && !self.store.expects()) {
            return;
        }
        let likely: u64 = self.hit(shared, rules, asked.trail, asked.tokens, Evidence::Likely).iter().sum();
        if likely <= had as u64 * u64::from(self.block_size()) {
            return;
        }
        // with EAGLE or MTP it had one block more, and dropped that from its hit
        let missed = had + usize::from(self.facts.eagle);
        let limit = self.limit(asked) as usize;
        for block in missed..limit {
            let dropped = self.store.drop_expected(shared, asked.trail.key(block));
            self.counts.add_many(Counted::DoubtfulMissed, dropped);
        }
        if missed < limit {
            // not the runs of later requests: this one's blocks are there now
            self.runs.end_with(asked.trail.key(missed), AsOf::unpack(answer.as_of).position);
        }
    }

    /// What is more than the events tell counts until it may have gone, or its time is over.
    fn record(
        &mut self,
        shared: &mut Shared,
        rules: &[Rule],
        asked: &mut Asked<'_, '_>,
        had: usize,
        since: &Since,
        answer: &Answer,
    ) {
        if self.trust(Some(rules)) != Trust::Partial || since.keyless {
            return;
        }
        // dialects name images in different ways, so that a removal might not be known to be of such a block
        let keyed = had.min(asked.first_with_keys);
        let run = (0..keyed).find(|block| since.named(asked.trail.key(*block))).unwrap_or(keyed);
        let told: u64 = self.hit(shared, rules, asked.trail, asked.tokens, Evidence::Events).iter().sum();
        if run as u64 * u64::from(self.block_size()) <= told {
            return;
        }
        let hidden = self.shows_unknown_keys || (self.hides_keys && asked.named_keys);
        if hidden || !self.is_plain(rules) {
            self.counts.add(Counted::ObservedUnusable);
            return;
        }
        let next = (run == had && asked.first_with_keys != had).then(|| asked.trail.content(had)).flatten();
        let keys = (0..run).map(|block| asked.trail.key(block)).collect();
        let dropped = self.runs.observe(Observed { keys, next, until: answer.until, position: self.removals.step() });
        self.counts.add(Counted::ObservedRuns);
        self.counts.add_many(Counted::ObservedDropped, dropped);
        if let Some(content) = next
            && !self.runs.is_empty()
        {
            self.adopt_parked(shared, content);
        }
    }
}
