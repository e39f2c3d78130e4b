//! What a worker can do for a prompt, and how far that can be trusted.
//!
//! Trust is `none` when soundness is unknown: no rule is proven for what the events show (see [`Worker::rules`]), the
//! worker's stream does not tell at present, or a request with a salt or an image went to a worker whose dialect hides
//! those. Otherwise it is `partial` after a loss, else `exact`.

use super::life::Mark;
use super::{Group, Worker};
use crate::event::Tier;
use crate::hits::{Held, Kind, Question, Rule, hit_blocks};
use crate::removals::AsOf;
use crate::shared::Shared;
use crate::store::{Hold, Place, StoreWalk};
use crate::trail::{Leg, Trail};

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

    /// What the worker can do for a prompt of `tokens` tokens; `trail` leads along its keys at this worker's block size.
    pub(crate) fn lookup(&self, shared: &Shared, trail: Option<&mut Trail<'_>>, tokens: usize) -> Match {
        let rules = self.rules();
        let trust = self.trust(rules.as_deref());
        let mut as_of = AsOf { position: self.removals.position(), leaned: false };
        let mut found = Match { credit: 0, expected: 0, by_tier: [0; 3], trust, as_of: as_of.pack() };
        let (Some(trail), Some(rules)) = (trail, rules) else {
            return found;
        };
        if rules.is_empty() {
            return found;
        }
        let mut hit = |evidence| self.hit(shared, &rules, trail, tokens, evidence);
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
        found
    }

    /// Tokens of the hit, per tier.
    pub(super) fn hit(
        &self,
        shared: &Shared,
        rules: &[Rule],
        trail: &mut Trail<'_>,
        tokens: usize,
        evidence: Evidence,
    ) -> [u64; 3] {
        let question = self.question(tokens);
        if let Some(run) = self.plain_hit(shared, rules, trail, question) {
            return [run * question.block_size, 0, 0];
        }
        let mut view = View {
            worker: self,
            shared,
            walk: self.store.walk(shared),
            trail,
            limit: question.limit() as usize,
            places: Tier::ALL.map(|tier| rules.iter().map(|rule| self.store.place(tier, rule.group)).collect()),
            even_doubtful: evidence == Evidence::Likely,
            observed: evidence != Evidence::Events && !self.runs.is_empty() && self.is_plain(rules),
            muddle: self.store.any_hidden().then(Muddle::default),
            leg: Leg::default(),
            hold: Hold::Absent,
        };
        let size = question.block_size;
        let mut run = hit_blocks(rules, question, OnGpu(&mut view));
        run = self.aligned(run);
        let mut blocks = [run, 0, 0];
        if rules.iter().all(|rule| rule.kind == Kind::Full) {
            while run < question.limit() {
                let mut all = |tier: &usize| (0..rules.len()).all(|rule| view.held(*tier, rule, run as usize));
                let Some(tier) = (1..3).find(|tier| all(tier)) else {
                    break;
                };
                blocks[tier] += 1;
                run += 1;
            }
        }
        blocks.map(|blocks| blocks * size)
    }

    /// Blocks of the hit where there is nothing but full attention and plain blocks: nearly always.
    fn plain_hit(&self, shared: &Shared, rules: &[Rule], trail: &mut Trail<'_>, question: Question) -> Option<u64> {
        let [Rule { group, kind: Kind::Full, .. }] = rules else {
            return None;
        };
        if !self.runs.is_empty() {
            return None;
        }
        if self.store.blocks() == 0 {
            return Some(0);
        }
        let member = self.store.only_plain(Tier::Gpu, *group)?;
        let run = trail.plain_end(shared, member, question.limit() as usize);
        Some(self.aligned(question.served(run as u64)))
    }

    /// Of a hit of so many blocks, as many as it is rounded down to.
    fn aligned(&self, run: u64) -> u64 {
        let size = u64::from(self.block_size());
        self.facts.hit_alignment.map_or(run, |alignment| run * size / alignment * alignment / size)
    }
}

/// What one worker holds of one prompt.
#[derive(Debug)]
struct View<'w, 't, 'p> {
    worker: &'w Worker,
    shared: &'w Shared,
    walk: StoreWalk<'w>,
    trail: &'t mut Trail<'p>,
    /// Blocks that are asked for at most.
    limit: usize,
    /// By tier and rule.
    places: [Vec<Option<Place>>; 3],
    even_doubtful: bool,
    /// What answers showed counts.
    observed: bool,
    muddle: Option<Muddle>,
    /// The leg that was looked at last, and how the worker holds its blocks.
    leg: Leg,
    hold: Hold,
}

impl View<'_, '_, '_> {
    #[inline]
    fn hold(&mut self, block: usize) -> Hold {
        if block < self.leg.start || block >= self.leg.end {
            self.leg = self.trail.leg(self.shared, block, self.limit);
            self.hold = self.walk.hold(self.leg.holders);
        }
        self.hold
    }

    fn held(&mut self, tier: usize, rule: usize, block: usize) -> bool {
        if self.observed && tier == 0 && self.worker.runs.holds(self.trail.key(block), self.even_doubtful) {
            return true;
        }
        let Some(place) = self.places[tier][rule] else {
            return false;
        };
        let hold = self.hold(block);
        if hold == Hold::Absent || !self.walk.held(hold, place, self.trail.key(block), self.even_doubtful) {
            return false;
        }
        let Self { muddle, worker, trail, .. } = self;
        !muddle.as_mut().is_some_and(|muddle| muddle.is_before(worker, block, trail))
    }
}

/// What stands in the engine's own cache.
struct OnGpu<'v, 'w, 't, 'p>(&'v mut View<'w, 't, 'p>);

impl Held for OnGpu<'_, '_, '_, '_> {
    fn held(&mut self, rule: usize, block: u64) -> bool {
        self.0.held(0, rule, block as usize)
    }

    fn unbroken(&mut self, rule: usize, start: u64, limit: u64) -> u64 {
        let Self(view) = self;
        let whole_legs = view.places[0][rule] == Some(Place::HOME) && view.muddle.is_none();
        let (mut at, limit) = (start as usize, limit as usize);
        while at < limit {
            if whole_legs && view.hold(at) == Hold::Plain {
                at = view.leg.end;
            } else if view.held(0, rule, at) {
                at += 1;
            } else {
                break;
            }
        }
        at.min(limit) as u64
    }
}

/// Where a prompt's first hidden key stands: several hashes claim it, and what was placed behind it may belong behind
/// any of them. So nothing counts there that events told.
#[derive(Debug, Default)]
struct Muddle {
    /// Blocks that were looked at.
    asked: usize,
    at: Option<usize>,
}

impl Muddle {
    fn is_before(&mut self, worker: &Worker, block: usize, trail: &mut Trail<'_>) -> bool {
        while self.at.is_none() && self.asked < block {
            if worker.store.is_hidden(trail.key(self.asked)) {
                self.at = Some(self.asked);
            }
            self.asked += 1;
        }
        self.at.is_some_and(|at| at < block)
    }
}
