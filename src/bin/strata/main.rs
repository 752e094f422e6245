//! The `strata` program: parse, run one subcommand, turn its result into an exit code.

#![warn(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod cli;
mod convert;
mod inspect;
mod kl_compare;
mod parity;
mod perplexity;
mod run;
mod serve;
mod vision;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Get the most out of Qwen3.6-35B-A3B on the machine in front of you.
#[derive(Parser)]
#[command(name = "strata", version, max_term_width = 120, propagate_version = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failure, 2 bad input or usage, 3 a comparison went past its threshold, 130 interrupted."
)]
struct Strata {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Say what is in a model file, what strata can do with it and what it lacks
    Inspect(inspect::Args),
    /// Convert a checkpoint to GGUF, restore or drop the MTP head of a GGUF, or prove a file against its source
    Convert(Box<convert::Args>),
    /// Generate text from a prompt, a file, a pipe, or in a conversation
    Run(Box<run::Args>),
    /// Serve several requests at once over HTTP (OpenAI's and Anthropic's APIs, and a chat page)
    Serve(Box<serve::Args>),
    /// Measure speed, alone or side by side with llama.cpp
    Bench(Box<bench::Args>),
    /// Encode a picture and show what the model sees
    Vision(Box<vision::Args>),
    /// Compare two runs token by token: two files, two settings, or a saved reference
    Parity(Box<parity::Args>),
    /// KL divergence of a model from a reference over a text
    KlCompare(Box<kl_compare::Args>),
    /// Perplexity of a text
    Perplexity(Box<perplexity::Args>),
}

/// llama.cpp's `-np`, which is two letters behind one dash.
fn long_form(argument: std::ffi::OsString) -> std::ffi::OsString {
    if argument == "-np" { "--parallel".into() } else { argument }
}

fn main() -> ExitCode {
    let command = Strata::parse_from(std::env::args_os().map(long_form)).command;
    if let Err(problem) = strata_kernels::cpu::Simd::from_env() {
        return cli::failure::report(&cli::failure::BadInput::new(problem).into());
    }
    let result = match command {
        Command::Inspect(args) => inspect::run(args),
        Command::Bench(args) => bench::run(*args),
        Command::Convert(args) => convert::run(*args),
        Command::Run(args) => run::run(*args),
        Command::Serve(args) => serve::run(*args),
        Command::Vision(args) => vision::run(*args),
        Command::Parity(args) => parity::run(*args),
        Command::KlCompare(args) => kl_compare::run(*args),
        Command::Perplexity(args) => perplexity::run(*args),
    };
    result.unwrap_or_else(|error| cli::failure::report(&error))
}
