//! What a worker can do for a prompt, and how far that can be trusted.
//!
//! Trust is `none` when soundness is unknown: no rule is proven for what the events show (see [`Worker::rules`]), the
//! worker's stream does not tell at present, or a request with a salt or an image went to a worker whose dialect hides
//! those. Otherwise it is `partial` after a loss, else `exact`.

use super::life::Mark;
use super::{Group, Worker};
use crate::event::Tier;
use crate::hits::{Kind, Question, Rule, hit_blocks};
use crate::key::KeyChain;
use crate::removals::AsOf;
use crate::store::{Place, Store};

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
    /// Where the worker's removals stood; [`Answer::as_of`](super::Answer) wants it back.
    pub as_of: u64,
}

/// What counts as held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Evidence {
    /// What the events tell, without doubtful copies and guessed blocks.
    Events,
    /// And what answers showed.
    All,
    /// And all that is doubtful or guessed.
    Likely,
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

    pub(super) fn trust(&self, rules: Option<&[Rule]>) -> Trust {
        if self.suspended || rules.is_none() || (self.hides_keys && self.marks.hidden_keys != Mark::Absent) {
            Trust::None
        } else if self.lost {
            Trust::Partial
        } else {
            Trust::Exact
        }
    }

    /// Does a hit of n blocks say that each of the first n is held, and a shorter one that the next is not?
    pub(super) fn is_plain(&self, rules: &[Rule]) -> bool {
        self.facts.hit_alignment.is_none() && rules.iter().all(|rule| rule.kind == Kind::Full)
    }

    pub(super) fn question(&self, tokens: usize) -> Question {
        Question {
            tokens: tokens as u64,
            block_size: self.block_size().into(),
            chunk: self.facts.attention_chunk_size.unwrap_or(1),
            eagle: self.facts.eagle,
        }
    }

    /// What the worker can do for a prompt of `tokens` tokens; `chain` gives its keys at this worker's block size. With
    /// `note_reads` the blocks of the answer go later than others when there is too little room.
    pub fn lookup(&self, chain: Option<&mut KeyChain<'_>>, tokens: usize, note_reads: bool) -> Match {
        let rules = self.rules();
        let trust = self.trust(rules.as_deref());
        let mut as_of = AsOf { position: self.removals.position(), leaned: false };
        let mut found = Match { credit: 0, expected: 0, by_tier: [0; 3], trust, as_of: as_of.pack() };
        let (Some(chain), Some(rules)) = (chain, rules) else {
            return found;
        };
        if rules.is_empty() {
            return found;
        }
        let walks_reads = note_reads && self.walks_what_is_read(&rules);
        let mut hit = |evidence| self.hit(&rules, chain, tokens, evidence, walks_reads);
        if trust != Trust::None {
            found.by_tier = hit(Evidence::Events);
            let told: u64 = found.by_tier.iter().sum();
            if !self.runs.is_empty() {
                found.by_tier = hit(Evidence::All);
            }
            found.credit = found.by_tier.iter().sum();
            as_of.leaned = found.credit > told;
            found.as_of = as_of.pack();
        }
        if trust == Trust::None || self.store.expects() || !self.runs.is_empty() {
            let likely: u64 = hit(Evidence::Likely).iter().sum();
            found.expected = likely.saturating_sub(found.credit);
        }
        if note_reads && !walks_reads {
            let blocks = (found.credit + found.expected) / u64::from(self.block_size());
            let mut walk = self.store.walk(false);
            (0..blocks as usize).for_each(|block| walk.note_read(chain.key(block)));
        }
        found
    }

    /// Is each block that the walk of a hit finds held one of the answer's? Then reads are noted on the way.
    fn walks_what_is_read(&self, rules: &[Rule]) -> bool {
        rules.len() == 1
            && self.is_plain(rules)
            && !self.facts.eagle
            && self.runs.is_empty()
            && !self.store.any_hidden()
    }

    /// Tokens of the hit, per tier.
    pub(super) fn hit(
        &self,
        rules: &[Rule],
        chain: &mut KeyChain<'_>,
        tokens: usize,
        evidence: Evidence,
        note_reads: bool,
    ) -> [u64; 3] {
        let places = Tier::ALL.map(|tier| {
            let of_rule = |rule: &Rule| self.store.place(tier, rule.group);
            rules.iter().map(of_rule).collect::<Vec<Option<Place>>>()
        });
        let even_doubtful = evidence == Evidence::Likely;
        let observed = evidence != Evidence::Events && !self.runs.is_empty() && self.is_plain(rules);
        let mut walk = self.store.walk(note_reads);
        let mut told = |tier: usize, rule: usize, key| {
            places[tier][rule].is_some_and(|place| walk.held(place, key, even_doubtful))
        };
        if !observed && !self.store.any_hidden() {
            // nearly always: this loop is what a lookup takes its time for
            return self.hit_of(rules, tokens, |tier, rule, block| told(tier, rule, chain.key(block)));
        }
        let mut muddle = Muddle { store: &self.store, asked: 0, at: None };
        self.hit_of(rules, tokens, |tier, rule, block| {
            let key = chain.key(block);
            (observed && tier == 0 && self.runs.holds(key, even_doubtful))
                || (told(tier, rule, key) && !muddle.is_before(block, chain))
        })
    }

    /// Tokens of the hit, per tier; `held` is asked with a tier's number, a rule's, and a block.
    fn hit_of(&self, rules: &[Rule], tokens: usize, mut held: impl FnMut(usize, usize, usize) -> bool) -> [u64; 3] {
        let question = self.question(tokens);
        let size = question.block_size;
        let mut run = hit_blocks(rules, question, |rule, block| held(0, rule, block as usize));
        if let Some(alignment) = self.facts.hit_alignment {
            run = run * size / alignment * alignment / size;
        }
        let mut blocks = [run, 0, 0];
        if rules.iter().all(|rule| rule.kind == Kind::Full) {
            while run < question.limit() {
                let all = |tier: &usize| (0..rules.len()).all(|rule| held(*tier, rule, run as usize));
                let Some(tier) = (1..3).find(all) else {
                    break;
                };
                blocks[tier] += 1;
                run += 1;
            }
        }
        blocks.map(|blocks| blocks * size)
    }
}

/// Where a prompt's first hidden key stands: several hashes claim it, and what was placed behind it may belong behind
/// any of them. So nothing counts there that events told.
struct Muddle<'w> {
    store: &'w Store,
    /// Blocks that were looked at.
    asked: usize,
    at: Option<usize>,
}

impl Muddle<'_> {
    fn is_before(&mut self, block: usize, chain: &mut KeyChain<'_>) -> bool {
        while self.at.is_none() && self.asked < block {
            if self.store.is_hidden(chain.key(self.asked)) {
                self.at = Some(self.asked);
            }
            self.asked += 1;
        }
        self.at.is_some_and(|at| at < block)
    }
}
