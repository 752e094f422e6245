//! `strata vision`: encode a picture and show what the model sees.

use crate::cli::failure::{BEYOND_THRESHOLD, BadInput};
use crate::cli::input;
use crate::cli::model::{VisionArg, VisionArgs, open_encoder};
use crate::cli::{output, settings};
use clap::Parser;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use strata::bundled;
use strata_core::vision::checksum::{Checksum, pin_beside};
use strata_core::vision::dump::{Comparison, compare, read_rows, write_png, write_rows};
use strata_core::vision::{EncodeTimes, PictureRows, PreprocessOptions, Preprocessed, VisionEncoder};

/// Encode a picture and show what the model sees.
///
/// Prints sizes, the token grid, the time of every stage and statistics of the rows; can write the rows, compare them with
/// rows written before or by another implementation, and write the picture as the encoder sees it.
#[derive(Parser, Debug)]
pub struct Args {
    /// The picture: PNG, JPEG, WebP, GIF or BMP; `-` reads standard input
    #[arg(value_name = "PICTURE")]
    picture: PathBuf,
    #[command(flatten)]
    vision: VisionArgs,
    /// Write the rows as safetensors: `rows` [blocks, width] F32 and `grid` [2] I32
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Compare with the `rows` of a safetensors file; exit code 3 when the largest difference is above --tolerance
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Largest difference allowed by --compare, relative to the largest value of the reference
    #[arg(long, value_name = "X", default_value_t = 1e-4, requires = "compare", allow_negative_numbers = true, value_parser = settings::bound)]
    tolerance: f64,
    /// Write the resized picture as PNG: what the encoder sees
    #[arg(long, value_name = "FILE")]
    render: Option<PathBuf>,
    /// Threads [default: one per core]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Report as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let pin = args.vision.mmproj.as_deref().map(pin_beside);
    let inputs = [Some(args.picture.as_path()), args.vision.mmproj.as_deref(), pin.as_deref(), args.compare.as_deref()];
    output::check(&[args.out.as_deref(), args.render.as_deref()], &inputs)?;
    let bytes = input::read(&args.picture)?;
    let threads =
        args.threads.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), |n| n as usize);
    let start = Instant::now();
    let (encoder, checksum) = encoder(&args.vision, threads)?;
    let open = start.elapsed();
    let options = args.vision.preprocess_options(&encoder, PreprocessOptions::default().max_tokens)?;
    let start = Instant::now();
    let bad = |error| BadInput::new(format!("{}: {error}", args.picture.display()));
    let picture = encoder.preprocess(&bytes, &options).map_err(bad)?;
    let preprocess = start.elapsed();
    if let Some(path) = &args.render {
        write_png(path, &picture)?;
    }
    let start = Instant::now();
    let (rows, times) = encoder.encode_timed(&picture);
    let encode = start.elapsed();
    if let Some(path) = &args.out {
        write_rows(path, &rows)?;
    }
    let comparison = match &args.compare {
        Some(path) => {
            let (reference, shape) = read_rows(path)?;
            Some(compare(&rows, &reference, &shape)?)
        }
        None => None,
    };
    let agrees = comparison.as_ref().is_none_or(|c| f64::from(c.relative()) <= args.tolerance);
    let report = Report { encoder: &encoder, checksum, picture, rows, open, preprocess, encode, times, comparison };
    if args.json {
        crate::cli::outln!("{}", serde_json::to_string_pretty(&report.json())?);
    } else {
        report.print(args.tolerance)?;
    }
    Ok(if agrees { ExitCode::SUCCESS } else { ExitCode::from(BEYOND_THRESHOLD) })
}

/// The encoder the arguments name, or the bundled one, and what its file was checked against.
fn encoder(args: &VisionArgs, threads: usize) -> anyhow::Result<(VisionEncoder, Checksum)> {
    args.check_place()?;
    if args.vision == VisionArg::No {
        return Err(BadInput::new("--vision no leaves this command nothing to do").into());
    }
    if let Some(path) = &args.mmproj {
        return open_encoder(path, args.mmproj_sha256.as_deref(), threads);
    }
    let data = bundled::encoder().ok_or_else(|| {
        BadInput::new("no vision encoder given, and this build has none bundled").hint("give one with --mmproj FILE")
    })?;
    strata::errln!("strata: using the bundled vision encoder (choose another with --mmproj FILE)");
    Ok((VisionEncoder::from_bytes("the bundled vision encoder", data, threads)?, Checksum::Unpinned))
}

/// Everything the command found out.
struct Report<'a> {
    encoder: &'a VisionEncoder,
    checksum: Checksum,
    picture: Preprocessed,
    rows: PictureRows,
    open: Duration,
    preprocess: Duration,
    encode: Duration,
    times: EncodeTimes,
    comparison: Option<Comparison>,
}

/// Statistics of the rows' values.
struct RowStatistics {
    mean: f64,
    deviation: f64,
    min: f32,
    max: f32,
    shortest: f64,
    longest: f64,
}

impl RowStatistics {
    fn of(rows: &PictureRows) -> Self {
        let n = rows.data.len().max(1) as f64;
        let mean = rows.data.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let variance = rows.data.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
        let norms: Vec<f64> =
            (0..rows.rows()).map(|r| rows.row(r).iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt()).collect();
        Self {
            mean,
            deviation: variance.sqrt(),
            min: rows.data.iter().copied().fold(f32::INFINITY, f32::min),
            max: rows.data.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            shortest: norms.iter().copied().fold(f64::INFINITY, f64::min),
            longest: norms.iter().copied().fold(0.0, f64::max),
        }
    }
}

fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e5).round() / 100.0
}

impl Report<'_> {
    /// The stages of a picture's way, in order.
    fn stages(&self) -> [(&'static str, Duration); 7] {
        [
            ("open encoder", self.open),
            ("decode, resize", self.preprocess),
            ("embed patches", self.times.embed),
            ("projections", self.times.projections),
            ("attention", self.times.attention),
            ("mlp", self.times.mlp),
            ("merger", self.times.merger),
        ]
    }

    fn key(&self) -> String {
        self.picture.key.iter().map(|b| format!("{b:02x}")).collect()
    }

    fn print(&self, tolerance: f64) -> anyhow::Result<()> {
        let (picture, shape) = (&self.picture, self.encoder.shape());
        crate::cli::outln!(
            "encoder     {} layers of {}, {} heads, patches of {} pixels, rows of {}",
            shape.layers,
            shape.hidden,
            shape.heads,
            shape.picture.patch,
            shape.out
        );
        match &self.checksum {
            Checksum::Unpinned => {}
            Checksum::Verified { sha256, pinned_by } => crate::cli::outln!("sha256      {sha256} (as {pinned_by})"),
        }
        crate::cli::outln!(
            "picture     {} of {}x{} pixels",
            picture.format,
            picture.source_size.0,
            picture.source_size.1
        );
        crate::cli::outln!("resized     {}x{} pixels", picture.size.0, picture.size.1);
        crate::cli::outln!(
            "grid        {} rows x {} columns = {} tokens",
            picture.grid.0,
            picture.grid.1,
            self.rows.rows()
        );
        crate::cli::outln!("key         {}", self.key());
        for note in &picture.notes {
            crate::cli::outln!("note        {note}");
        }
        for (stage, time) in self.stages() {
            crate::cli::outln!("{stage:<15} {:>10.2} ms", milliseconds(time));
        }
        let total = self.encode.as_secs_f64();
        crate::cli::outln!(
            "{:<15} {:>10.2} ms, {:.1} tokens/s",
            "encode",
            milliseconds(self.encode),
            self.rows.rows() as f64 / total
        );
        let s = RowStatistics::of(&self.rows);
        crate::cli::outln!(
            "values      mean {:.5}, deviation {:.5}, from {:.5} to {:.5}; row lengths {:.3} to {:.3}",
            s.mean,
            s.deviation,
            s.min,
            s.max,
            s.shortest,
            s.longest
        );
        if let Some(c) = &self.comparison {
            crate::cli::outln!(
                "compare     largest difference {:.3e} (block {}, column {}), rms {:.3e}, relative {:.3e}: {}",
                c.largest,
                c.at.0,
                c.at.1,
                c.rms,
                c.relative(),
                if f64::from(c.relative()) <= tolerance { "within" } else { "BEYOND" }
            );
            crate::cli::outln!("tolerance   {tolerance:e} of the largest value {:.5}", c.scale);
        }
        Ok(())
    }

    fn json(&self) -> serde_json::Value {
        let (picture, shape, s) = (&self.picture, self.encoder.shape(), RowStatistics::of(&self.rows));
        let times: serde_json::Map<String, serde_json::Value> = self
            .stages()
            .into_iter()
            .chain([("encode", self.encode)])
            .map(|(stage, time)| (stage.replace(", ", "_").replace(' ', "_"), milliseconds(time).into()))
            .collect();
        serde_json::json!({
            "encoder": {
                "layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads,
                "feed_forward": shape.feed_forward, "patch": shape.picture.patch, "width": shape.out,
            },
            "sha256": match &self.checksum {
                Checksum::Unpinned => None,
                Checksum::Verified { sha256, .. } => Some(sha256),
            },
            "format": picture.format,
            "source_size": picture.source_size,
            "size": picture.size,
            "grid": picture.grid,
            "tokens": self.rows.rows(),
            "key": self.key(),
            "notes": picture.notes,
            "milliseconds": times,
            "values": {
                "mean": s.mean, "deviation": s.deviation, "min": s.min, "max": s.max,
                "shortest_row": s.shortest, "longest_row": s.longest,
            },
            "compare": self.comparison.as_ref().map(|c| serde_json::json!({
                "largest": c.largest, "rms": c.rms, "relative": c.relative(), "block": c.at.0, "column": c.at.1,
            })),
        })
    }
}
