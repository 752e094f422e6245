//! What rules over the sampler: a grammar, and the budget of reasoning that is closed by force when it is used up.

use std::collections::VecDeque;

use crate::text::grammar::{Grammar, TokenMask};
use crate::text::{Specials, Tokenizer};

/// The rules of one answer.
pub(crate) struct Constraint {
    grammar: Option<Grammar>,
    in_reasoning: bool,
    think_start: Option<u32>,
    think_end: Option<u32>,
    /// Tokens of reasoning left.
    budget: Option<usize>,
    /// Tokens that end the reasoning by force.
    closing: Vec<u32>,
    /// Tokens that come next whatever the logits say.
    forced: VecDeque<u32>,
    started: bool,
    /// The reasoning was closed by force. The model, which did not mean to stop, may close it once more; that tag would be read as
    /// part of the answer.
    closed_by_force: bool,
}

impl Constraint {
    pub(crate) fn new(
        grammar: Option<Grammar>,
        in_reasoning: bool,
        budget: Option<usize>,
        tokenizer: &Tokenizer,
    ) -> Self {
        let think_end = tokenizer.id_of("</think>");
        let closing = match (budget, think_end) {
            (Some(_), Some(end)) => {
                let ids = |text: &str| tokenizer.encode(text, Specials::AsText).unwrap_or_default();
                ids("\n").into_iter().chain([end]).chain(ids("\n\n")).collect()
            }
            _ => Vec::new(),
        };
        let mut constraint = Constraint {
            grammar,
            in_reasoning: in_reasoning && think_end.is_some(),
            think_start: tokenizer.id_of("<think>"),
            think_end,
            budget: budget.filter(|_| think_end.is_some()),
            closing,
            forced: VecDeque::new(),
            started: false,
            closed_by_force: false,
        };
        constraint.close_if_used_up();
        constraint
    }

    /// The token that must come next.
    pub(crate) fn forced(&self) -> Option<u32> {
        self.forced.front().copied()
    }

    /// A token that must not come next whatever the grammar says.
    pub(crate) fn forbidden(&self) -> Option<u32> {
        self.think_end.filter(|_| self.closed_by_force && self.forced.is_empty())
    }

    /// What the grammar allows next; `None` allows everything.
    pub(crate) fn mask(&mut self) -> Result<Option<&TokenMask>, String> {
        match &mut self.grammar {
            Some(grammar) => grammar.mask().map(Some).map_err(|error| error.to_string()),
            None => Ok(None),
        }
    }

    /// Takes note of the token chosen.
    pub(crate) fn accept(&mut self, id: u32) -> Result<(), String> {
        let first = !std::mem::replace(&mut self.started, true);
        let was_forced = self.forced.pop_front().is_some();
        if first && self.think_start == Some(id) {
            self.in_reasoning = self.think_end.is_some();
        } else if self.in_reasoning {
            self.in_reasoning = self.think_end != Some(id);
            self.budget = self.budget.map(|left| left.saturating_sub(1));
        }
        if !was_forced {
            self.close_if_used_up();
        }
        match &mut self.grammar {
            Some(grammar) => grammar.accept(id).map_err(|error| error.to_string()),
            None => Ok(()),
        }
    }

    /// The grammar allows nothing after this.
    pub(crate) fn is_complete(&self) -> bool {
        self.grammar.as_ref().is_some_and(Grammar::is_stopped)
    }

    fn close_if_used_up(&mut self) {
        if self.in_reasoning && self.budget == Some(0) {
            self.forced.extend(&self.closing);
            self.closed_by_force = true;
        }
    }
}
