//! Proof that a model file, a setting or a backend gives the answers it should: perplexity, KL divergence against a
//! reference, token-by-token parity, and where in the network two runs first part.
//!
//! Everything here runs through [`Model::forward`](crate::model::Model::forward), on texts whose tokens are given
//! (teacher-forced), so that one difference does not hide the next.

mod base_file;
mod chunks;
mod divergence;
mod figures;
mod parity;
mod plot;
mod tensors;
mod trace;

pub use base_file::{BaseReader, BaseWriter};
pub use chunks::{ChunkedText, LogProbs, Source};
pub use divergence::{Divergence, Perplexity, kl_divergence, measure};
pub use figures::{Figure, Figures};
pub use parity::{
    Candidate, CaseReport, Difference, ParityReport, PromptDifference, PromptSource, Reference, ReferenceCase, compare,
    record, score,
};
pub use plot::kl_plot;
pub use tensors::{TensorDifference, TensorFinding, compare_tensors};
pub use trace::{LayerDifference, TraceReport, trace};

/// What can go wrong with a comparison, apart from what it finds.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    /// The model refused rows.
    #[error(transparent)]
    Model(#[from] crate::model::ModelError),
    /// A prompt could not be encoded.
    #[error(transparent)]
    Text(#[from] crate::text::TextError),
    /// The text or the sizes asked for do not fit together.
    #[error("{0}")]
    Input(String),
    /// A file of saved log-probabilities or a saved reference is not what it should be.
    #[error("{file}: {problem}")]
    File {
        /// The file.
        file: String,
        /// What was expected and what was found.
        problem: String,
    },
    /// An output cannot be written.
    #[error(transparent)]
    Output(#[from] crate::output::OutputError),
    /// Reading failed.
    #[error("{file}")]
    Io {
        /// The file.
        file: String,
        /// The cause.
        source: std::io::Error,
    },
}
