//! What a worker can do for a prompt, and how far that can be trusted.
//!
//! Trust is `none` when soundness is unknown: no rule is proven for what the events show (see [`Worker::rules`]), the
//! worker's stream does not tell at present, or a request with a salt or an image went to a worker whose dialect hides
//! those. Otherwise it is `partial` after a loss, else `exact`.

use super::{Group, Worker};
use crate::event::Tier;
use crate::hits::{Kind, Question, Rule, hit_blocks};
use crate::key::KeyChain;
use crate::store::Place;

/// How far a match can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// Credit is sound and complete.
    Exact,
    /// Credit is sound, perhaps incomplete.
    Partial,
    /// Soundness is unknown: no credit is given.
    None,
}

impl Trust {
    /// The short word for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Partial => "partial",
            Self::None => "none",
        }
    }
}

/// What one worker can do for one prompt. All figures are tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// The worker can serve the first `credit` tokens from its cache.
    pub credit: u64,
    /// Tokens beyond `credit` that it may well have: a hint, never credit.
    pub expected: u64,
    /// How `credit` divides over [`Tier::ALL`].
    pub by_tier: [u64; 3],
    /// How far to trust it.
    pub trust: Trust,
}

impl Worker {
    /// How hits are counted here; `None` when no rule is proven for what the events show.
    pub(super) fn rules(&self) -> Option<Vec<Rule>> {
        let full = || self.groups.values().filter(|group| group.kind() == Kind::Full).map(|group| group.block_size);
        let largest = self.groups.values().map(|group| group.block_size).max().unwrap_or(0);
        let size = full().max().filter(|size| *size > 0).unwrap_or(largest);
        let mut rules = Vec::with_capacity(self.groups.len());
        for (number, group) in &self.groups {
            let kind = group.kind();
            if kind == Kind::Unproven || group.block_size > size || (kind == Kind::Window && group.window <= 0) {
                return None;
            }
            if group.kind.is_none() && (self.groups.len() > 1 || group.sparse) {
                return None;
            }
            if kind == Kind::Chunked && self.facts.attention_chunk_size.is_none() {
                return None;
            }
            rules.push(Rule { group: *number, kind, window: group.window.try_into().unwrap_or(0) });
        }
        let has = |kinds: &[Kind]| rules.iter().any(|rule| kinds.contains(&rule.kind));
        let full_sizes_differ = full().min() != full().max();
        let partly_stored = has(&[Kind::Window, Kind::State]);
        if full_sizes_differ || (partly_stored && (has(&[Kind::Chunked]) || self.reannouncing())) {
            return None;
        }
        Some(rules)
    }

    /// The block size of the groups that place blocks; 0 before the first store.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        let sizes = |kind: Option<Kind>| {
            let of_kind = move |group: &&Group| kind.is_none_or(|kind| group.kind() == kind);
            self.groups.values().filter(of_kind).map(|group| group.block_size).max()
        };
        sizes(Some(Kind::Full)).or_else(|| sizes(None)).unwrap_or(0)
    }

    pub(super) fn trust(&self, rules: Option<&Vec<Rule>>) -> Trust {
        if self.suspended || rules.is_none() || (self.hides_keys && self.hidden_request) {
            Trust::None
        } else if self.lost {
            Trust::Partial
        } else {
            Trust::Exact
        }
    }

    /// What the worker can do for a prompt of `tokens` tokens; `chain` gives its keys at this worker's block size.
    pub fn lookup(&self, chain: Option<&mut KeyChain<'_>>, tokens: usize) -> Match {
        let rules = self.rules();
        let trust = self.trust(rules.as_ref());
        let mut found = Match { credit: 0, expected: 0, by_tier: [0; 3], trust };
        let (Some(chain), Some(rules)) = (chain, rules) else {
            return found;
        };
        if rules.is_empty() {
            return found;
        }
        if trust != Trust::None {
            found.by_tier = self.hit(&rules, chain, tokens, false);
            found.credit = found.by_tier.iter().sum();
        }
        if trust == Trust::None || self.store.totals().doubtful > 0 {
            let likely: u64 = self.hit(&rules, chain, tokens, true).iter().sum();
            found.expected = likely.saturating_sub(found.credit);
        }
        found
    }

    /// Tokens of the hit, per tier.
    fn hit(&self, rules: &[Rule], chain: &mut KeyChain<'_>, tokens: usize, even_doubtful: bool) -> [u64; 3] {
        let places = Tier::ALL.map(|tier| {
            let of_rule = |rule: &Rule| self.store.place(tier, rule.group);
            rules.iter().map(of_rule).collect::<Vec<Option<Place>>>()
        });
        let mut walk = self.store.walk();
        let mut held = |tier: usize, rule: usize, block: u64| {
            let key = chain.key(block as usize);
            places[tier][rule].is_some_and(|place| walk.held(place, key, even_doubtful))
        };
        let size = u64::from(self.block_size());
        let question = Question {
            tokens: tokens as u64,
            block_size: size,
            chunk: self.facts.attention_chunk_size.unwrap_or(1),
            eagle: self.facts.eagle,
        };
        let mut run = hit_blocks(rules, question, |rule, block| held(0, rule, block));
        if let Some(alignment) = self.facts.hit_alignment {
            run = run * size / alignment * alignment / size;
        }
        let mut blocks = [run, 0, 0];
        if rules.iter().all(|rule| rule.kind == Kind::Full) {
            while run < question.limit() {
                let Some(tier) = (1..3).find(|&tier| (0..rules.len()).all(|rule| held(tier, rule, run))) else {
                    break;
                };
                blocks[tier] += 1;
                run += 1;
            }
        }
        blocks.map(|blocks| blocks * size)
    }
}
