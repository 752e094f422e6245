//! Drafts: proposers (n-gram lookup, the MTP head), the policy that says how many, and the acceptance they get. Verification is
//! part of every decode window, so an answer never depends on what was proposed.

mod acceptance;
mod confidence;
mod costs;
mod mtp;
mod ngram;
mod policy;
mod vocabulary;

pub(crate) use acceptance::{Acceptance, implausible};
pub(crate) use confidence::Level;
pub(crate) use mtp::MtpFeed;
pub(crate) use ngram::NgramIndex;
pub(crate) use policy::{DraftPolicy, Offer, Source};
pub(crate) use vocabulary::DraftVocabulary;
