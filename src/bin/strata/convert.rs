//! `strata convert`: checkpoints to GGUF with nothing lost, moving MTP heads between files, and the proof.
//!
//! This file is the command line and what it prints; the work is done in `strata_core::convert`.

use crate::cli::failure::{BEYOND_THRESHOLD, BadInput, INTERRUPTED};
use crate::cli::interrupt::Interrupt;
use crate::cli::progress;
use crate::cli::wording::{agreeing, counted};
use anyhow::Result;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;
use strata_core::convert::{
    AS_ASKED, ConvertError, ConvertOptions, ConvertReport, GraftOptions, GraftReport, LeftOut, Override, Pattern,
    PlanOptions, Progress, Recipe, TensorReport, Verdict, Verification, convert_text_model, convert_vision, drop_head,
    graft_head, verify,
};
use strata_core::gguf::{GgufFile, WriterOptions, split_parts};
use strata_core::output::{self, Existing};
use strata_kernels::format::TensorType;

/// Convert a checkpoint to GGUF, restore or drop the MTP head of a GGUF, or prove a file against its source
///
/// With a Hugging Face folder: writes the text model (-o) and the vision encoder (--mmproj), then compares every element
/// with the source. With a GGUF and --mtp-from: writes the same file with the MTP head. With --verify: only compares.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Hugging Face folder (or its safetensors index), or the GGUF to graft onto
    #[arg(value_name = "SOURCE", required_unless_present = "verify")]
    input: Option<PathBuf>,
    /// GGUF to write
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Type or recipe: F32, F16, BF16, Q8_0, Q4_K, Q5_K, Q6_K, Q4_K_M, Q5_K_M, UD-Q4_K_XL
    #[arg(long = "type", value_name = "TYPE", default_value = "UD-Q4_K_XL", alias = "outtype", value_parser = recipe)]
    recipe: Recipe,
    /// Another type for some tensors; PATTERN is part of a name, '*' stands for anything, '^' and '$' for the ends
    #[arg(long, value_name = "PATTERN=TYPE", value_parser = tensor_type)]
    tensor_type: Vec<Override>,
    /// Type of the MTP head's matrices [default: as the recipe says, but never below Q8_0]
    #[arg(long, value_name = "TYPE", value_parser = plain_type)]
    mtp_type: Option<TensorType>,
    /// Importance matrix (llama.cpp's GGUF form) that weights the quantizer
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Also write the vision encoder to this file
    #[arg(long, value_name = "FILE")]
    mmproj: Option<PathBuf>,
    /// Type of the encoder's matrices
    #[arg(long, value_name = "TYPE", default_value = "F16", value_parser = recipe)]
    mmproj_type: Recipe,
    /// Take the MTP head from this folder, index, safetensors shard or GGUF and put it into SOURCE, a GGUF without one
    #[arg(long, value_name = "FROM", conflicts_with_all = ["drop_mtp", "no_mtp", "mmproj", "imatrix"])]
    mtp_from: Option<PathBuf>,
    /// Write SOURCE, a GGUF, without its MTP head
    #[arg(long, conflicts_with_all = ["no_mtp", "mmproj", "imatrix"])]
    drop_mtp: bool,
    /// Leave the MTP head out of the conversion
    #[arg(long)]
    no_mtp: bool,
    /// Only compare this GGUF with --source; exit code 3 when anything is off
    #[arg(long, value_name = "FILE", requires = "source", conflicts_with_all = ["input", "output", "mmproj", "mtp_from", "drop_mtp"])]
    verify: Option<PathBuf>,
    /// The folder that --verify compares with
    #[arg(long, value_name = "DIR", requires = "verify", conflicts_with = "input")]
    source: Option<PathBuf>,
    /// Do not compare after writing
    #[arg(long)]
    no_verify: bool,
    /// Replace an existing output
    #[arg(short, long)]
    force: bool,
    /// Split the output into files of at most this size, in M or G (e.g. 4G, 500M)
    #[arg(long, value_name = "SIZE", value_parser = size)]
    split_max_size: Option<u64>,
    /// Name of the model in the file [default: from the folder's name]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Leave out checkpoint tensors that match, although no rule is known for them
    #[arg(long, value_name = "PATTERN", value_parser = pattern)]
    skip: Vec<Pattern>,
    /// Take the norms for zero-centred even where they look as if they carried the +1 already
    #[arg(long, alias = "assume-zero-centered-norms")]
    assume_zero_centred_norms: bool,
    /// Threads [default: one per core]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Say what was done with every tensor
    #[arg(short, long)]
    verbose: bool,
    /// Print the whole report as JSON
    #[arg(long)]
    json: bool,
}

fn recipe(text: &str) -> Result<Recipe, ConvertError> {
    Recipe::from_name(text)
}

fn tensor_type(text: &str) -> Result<Override, ConvertError> {
    Override::parse(text)
}

fn pattern(text: &str) -> Result<Pattern, ConvertError> {
    Pattern::new(text)
}

fn plain_type(text: &str) -> Result<TensorType, ConvertError> {
    match Recipe::from_name(text)? {
        Recipe::Uniform(ty) => Ok(ty),
        recipe => Err(ConvertError::BadType(format!("{} is a recipe, not a type", recipe.name()))),
    }
}

/// Bytes from `500M`, `4G` or `1.5GiB` (powers of two). A unit is asked for, as by llama.cpp: a number alone is too easily meant
/// to be one of files, or of gigabytes.
fn size(text: &str) -> Result<u64, String> {
    let bad = || format!("'{text}' is no size: expected a number with M or G, at least 1M");
    let unit_at = text.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(bad)?;
    let shift = match text[unit_at..].to_ascii_uppercase().trim_end_matches("IB").trim_end_matches('B') {
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(bad()),
    };
    let number: f64 = text[..unit_at].trim().parse().map_err(|_| bad())?;
    let bytes = number * f64::from(shift).exp2();
    if (f64::from(1 << 20)..1e18).contains(&bytes) { Ok(bytes as u64) } else { Err(bad()) }
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let interrupt = Interrupt::catch();
    let threads = args.threads.map_or(0, |n| n as usize);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    match pool.install(|| Command { args: &args, interrupt: &interrupt }.run()) {
        Err(error) if matches!(error.downcast_ref(), Some(ConvertError::Interrupted { .. })) => {
            strata::errln!("strata: {error}");
            Ok(ExitCode::from(INTERRUPTED))
        }
        Err(error) if error.downcast_ref().is_some_and(ConvertError::is_bad_input) => {
            // The command's own errors are of exit code 2, with their causes.
            let mut text = error.to_string();
            for cause in error.chain().skip(1).map(ToString::to_string).filter(|c| !error.to_string().contains(c)) {
                text += &format!(": {cause}");
            }
            let bad = BadInput::new(text);
            Err(match hint(error.downcast_ref()) {
                Some(hint) => bad.hint(hint).into(),
                None => bad.into(),
            })
        }
        other => other,
    }
}

/// What to do about an error.
fn hint(error: Option<&ConvertError>) -> Option<&'static str> {
    match error? {
        ConvertError::PromisedHeadMissing { .. } => {
            Some("fetch the shards that hold it (the index says which), or convert without it: --no-mtp")
        }
        ConvertError::NormsNotZeroCentred { .. } => {
            Some("convert the original checkpoint; if these norms are right, say --assume-zero-centred-norms")
        }
        ConvertError::UnknownTensors { .. } => Some("leave them out with --skip PATTERN if they are not needed"),
        _ => None,
    }
}

/// What a command has done so far.
#[derive(Default)]
struct Done {
    files: Vec<PathBuf>,
    reports: Vec<serde_json::Value>,
    /// Names of the text model's tensors.
    written: Vec<String>,
    /// Names of the checkpoint's tensors that --skip left out.
    skipped: Vec<String>,
}

/// One run with what it needs throughout.
struct Command<'a> {
    args: &'a Args,
    interrupt: &'a Interrupt,
}

impl Command<'_> {
    fn run(&self) -> Result<ExitCode> {
        if let (Some(file), Some(source)) = (&self.args.verify, &self.args.source) {
            let started = Instant::now();
            let verification = self.verify(file, source)?;
            let seconds = started.elapsed().as_secs_f64();
            if self.args.json {
                print_json(
                    &json!({ "file": file, "source": source, "verification": verification_json(&verification, seconds) }),
                )?;
            } else {
                self.print_verification(file, &verification, seconds)?;
            }
            return Ok(code(verification.is_good()));
        }
        let Some(input) = &self.args.input else { return Err(BadInput::new("no SOURCE given").into()) };
        self.check_outputs()?;
        match (&self.args.mtp_from, self.args.drop_mtp) {
            (Some(donor), _) => self.graft(input, Some(donor)),
            (None, true) => self.graft(input, None),
            (None, false) => self.convert(input),
        }
    }

    fn plan_options(&self) -> PlanOptions {
        PlanOptions {
            no_mtp: self.args.no_mtp,
            skip: self.args.skip.clone(),
            assume_zero_centred_norms: self.args.assume_zero_centred_norms,
        }
    }

    fn writer_options(&self) -> WriterOptions {
        let inputs = self.inputs().into_iter().map(Path::to_path_buf).collect();
        WriterOptions { force: self.args.force, split_max_size: self.args.split_max_size, inputs }
    }

    /// Everything the command reads; of a file of a checkpoint the folder with its other files.
    fn inputs(&self) -> Vec<&Path> {
        let given = [&self.args.input, &self.args.mtp_from, &self.args.imatrix];
        let given: Vec<&Path> = given.into_iter().flatten().map(PathBuf::as_path).collect();
        let of_checkpoint = |path: &&Path| path.extension().is_some_and(|e| e == "safetensors" || e == "json");
        let folders = given.iter().filter(|path| of_checkpoint(path)).filter_map(|path| path.parent());
        let folders = folders.map(|folder| if folder.as_os_str().is_empty() { Path::new(".") } else { folder });
        given.iter().copied().chain(folders).collect()
    }

    /// Refuses outputs that cannot be written before any work is done.
    fn check_outputs(&self) -> Result<()> {
        let outputs: Vec<&Path> =
            [&self.args.output, &self.args.mmproj].into_iter().flatten().map(PathBuf::as_path).collect();
        if let (Some(output), Some(mmproj), Some(_)) = (&self.args.output, &self.args.mmproj, self.args.split_max_size)
            && split_parts(mmproj).is_some_and(|(prefix, _, _)| prefix == output.with_extension(""))
        {
            let name = mmproj.display();
            return Err(BadInput::new(format!("--mmproj {name} is the name of a part of the split output")).into());
        }
        // A split output has other names, which the writer checks once it knows how many there are.
        let existing = match self.args.force || self.args.split_max_size.is_some() {
            true => Existing::Replace,
            false => Existing::Keep,
        };
        Ok(output::check(&outputs, &self.inputs(), existing)?)
    }

    /// Runs `work` with a progress bar of `total` bytes that an interrupt stops.
    fn with_bar<T>(&self, total: u64, what: &'static str, work: impl FnOnce(Progress) -> T) -> T {
        let bar = progress::bytes(total, what);
        let result = work(Progress { advance: &|n| bar.inc(n), stopped: &|| self.interrupt.pending() });
        bar.finish_and_clear();
        result
    }

    fn verify(&self, file: &Path, source: &Path) -> Result<Verification, ConvertError> {
        let gguf = GgufFile::open(file)?;
        let options = self.plan_options();
        self.with_bar(gguf.total_bytes(), "verifying", |p| verify(&gguf, source, &options, p))
    }

    /// Writes the text model and the encoder of a folder.
    fn convert(&self, source: &Path) -> Result<ExitCode> {
        let args = self.args;
        if source.is_file() && source.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
            let hint = "give a Hugging Face folder, or say what to do with the GGUF: --mtp-from or --drop-mtp";
            return Err(BadInput::new(format!("{} is a GGUF already", source.display())).hint(hint).into());
        }
        if args.output.is_none() && args.mmproj.is_none() {
            return Err(BadInput::new("no output named")
                .hint("-o FILE for the text model, --mmproj FILE for the encoder")
                .into());
        }
        let mut options = ConvertOptions {
            recipe: args.recipe,
            overrides: args.tensor_type.clone(),
            mtp_type: args.mtp_type,
            imatrix: args.imatrix.clone(),
            plan: self.plan_options(),
            name: args.name.clone(),
            writer: self.writer_options(),
        };
        let mut good = true;
        let mut done = Done::default();
        if let Some(out) = &args.output {
            good &= self.convert_one(source, out, &options, convert_text_model, &mut done)?;
        }
        if let Some(out) = &args.mmproj {
            options.recipe = args.mmproj_type;
            options.overrides.clear();
            options.writer.split_max_size = None;
            good &= self.convert_one(source, out, &options, convert_vision, &mut done)?;
        }
        warn_of_idle_patterns(&args.tensor_type, &done.written);
        for pattern in args.skip.iter().filter(|p| !done.skipped.iter().any(|name| p.matches(name))) {
            strata::errln!("warning: --skip {} left out no tensor (those the model needs always stay)", pattern.text());
        }
        if args.json {
            print_json(&json!({ "source": source, "outputs": done.reports }))?;
        }
        Ok(code(good))
    }

    /// Writes one file, proves it and reports.
    fn convert_one(
        &self,
        source: &Path,
        out: &Path,
        options: &ConvertOptions,
        convert: fn(&Path, &Path, &ConvertOptions, Progress) -> Result<ConvertReport, ConvertError>,
        done: &mut Done,
    ) -> Result<bool> {
        let started = Instant::now();
        let total = source_bytes(source);
        let report = self
            .with_bar(total, "converting", |p| convert(source, out, options, p))
            .map_err(|error| error.after_writing(&done.files))?;
        done.files.extend(report.files.iter().cloned());
        done.written.extend(report.tensors.iter().filter(|t| t.part != "vision").map(|t| t.name.clone()));
        let skipped = report.left_out.iter().filter(|t| t.why == AS_ASKED);
        done.skipped.extend(skipped.map(|t| t.name.clone()));
        let seconds = started.elapsed().as_secs_f64();
        let verified = Instant::now();
        let verification = match self.args.no_verify {
            true => None,
            false => Some(self.verify(&report.files[0], source).map_err(|error| error.after_writing(&done.files))?),
        };
        let verify_seconds = verified.elapsed().as_secs_f64();
        if self.args.json {
            let mut value = report_json(&report, seconds);
            value["verification"] = verification.as_ref().map_or(json!(null), |v| verification_json(v, verify_seconds));
            done.reports.push(value);
        } else {
            self.print_report(&report, seconds)?;
            if let Some(verification) = &verification {
                self.print_verification(&report.files[0], verification, verify_seconds)?;
            }
        }
        Ok(verification.is_none_or(|v| v.is_good()))
    }

    /// Puts a head into a GGUF, or takes it out.
    fn graft(&self, base: &Path, donor: Option<&PathBuf>) -> Result<ExitCode> {
        let args = self.args;
        let Some(out) = &args.output else { return Err(BadInput::new("no output named").hint("-o FILE").into()) };
        let started = Instant::now();
        let total = std::fs::metadata(base).map_or(0, |m| m.len());
        let report = self.with_bar(total, "grafting", |progress| match donor {
            Some(donor) => {
                let options = GraftOptions {
                    recipe: args.recipe,
                    mtp_type: args.mtp_type,
                    overrides: args.tensor_type.clone(),
                    plan: self.plan_options(),
                    writer: self.writer_options(),
                    verify: !args.no_verify,
                };
                graft_head(base, donor, out, &options, progress)
            }
            None => drop_head(base, out, &self.writer_options(), progress),
        })?;
        let seconds = started.elapsed().as_secs_f64();
        let added: Vec<String> = report.added.iter().map(|t| t.name.clone()).collect();
        warn_of_idle_patterns(&args.tensor_type, &added);
        if args.json {
            print_json(&graft_json(&report, seconds))?;
        } else {
            self.print_graft(&report, seconds)?;
        }
        Ok(code(report.verification.is_none_or(|v| v.is_good())))
    }

    fn print_report(&self, report: &ConvertReport, seconds: f64) -> Result<()> {
        let mut out = std::io::stdout().lock();
        print_tensors(&mut out, &report.tensors, self.args.verbose)?;
        print_left_out(&mut out, &report.left_out, self.args.verbose)?;
        for note in &report.notes {
            writeln!(out, "note: {note}")?;
        }
        if report.tensors.iter().any(|t| t.part != "vision") {
            match report.mtp_layers {
                0 => writeln!(out, "MTP head: none")?,
                n => writeln!(
                    out,
                    "MTP head: {}, {}",
                    counted(n as usize, "layer"),
                    counted(count_part(&report.tensors, "mtp"), "tensor")
                )?,
            }
        }
        for file in &report.files {
            writeln!(out, "wrote {}", file.display())?;
        }
        writeln!(
            out,
            "{}, {} in {seconds:.1} s ({:.2} GB/s read, {:.2} GB/s written)",
            counted(report.tensors.len(), "tensor"),
            gigabytes(report.written_bytes),
            report.read_bytes as f64 / seconds / 1e9,
            report.written_bytes as f64 / seconds / 1e9
        )?;
        Ok(())
    }

    fn print_graft(&self, report: &GraftReport, seconds: f64) -> Result<()> {
        let mut out = std::io::stdout().lock();
        print_tensors(&mut out, &report.added, self.args.verbose)?;
        if !report.dropped.is_empty() {
            writeln!(out, "dropped {} of the MTP head", counted(report.dropped.len(), "tensor"))?;
            if self.args.verbose {
                report.dropped.iter().try_for_each(|name| writeln!(out, "  {name}"))?;
            }
        }
        for change in &report.changed_keys {
            writeln!(out, "metadata: {change}")?;
        }
        for note in &report.notes {
            writeln!(out, "note: {note}")?;
        }
        writeln!(
            out,
            "carried over byte for byte: {}, {}, sha256 {}",
            counted(report.carried, "tensor"),
            gigabytes(report.carried_bytes),
            report.carried_hash
        )?;
        for file in &report.files {
            writeln!(out, "wrote {} in {seconds:.1} s", file.display())?;
        }
        drop(out);
        if let Some(verification) = &report.verification {
            self.print_verification(&report.files[0], verification, seconds)?;
        }
        Ok(())
    }

    /// Bad tensors always, all of them on request, and a line on the whole.
    fn print_verification(&self, file: &Path, v: &Verification, seconds: f64) -> Result<()> {
        let mut out = std::io::stdout().lock();
        let shown: Vec<_> = v.tensors.iter().filter(|t| self.args.verbose || !t.verdict.is_good()).collect();
        if !shown.is_empty() {
            writeln!(
                out,
                "{:<44} {:<5} {:>10} {:>10} {:>10} {:>10}  verdict",
                "tensor", "type", "max", "at most", "rmse", "at most"
            )?;
        }
        for t in shown {
            // Nothing was compared of a tensor that is missing, or cannot be.
            let number = |value: f64| if t.weights == 0 { "-".to_string() } else { format!("{value:.3e}") };
            writeln!(
                out,
                "{:<44} {:<5} {:>10} {:>10} {:>10} {:>10}  {}{}",
                t.name,
                t.ty,
                number(t.max_error),
                number(t.max_bound),
                number(t.rmse),
                number(t.rmse_bound),
                t.verdict.name(),
                t.reason.as_ref().map(|r| format!(": {r}")).unwrap_or_default()
            )?;
        }
        for difference in &v.metadata {
            writeln!(out, "metadata {difference}")?;
        }
        let count = |verdict| v.tensors.iter().filter(|t| t.verdict == verdict).count();
        let bad = v.tensors.iter().filter(|t| !t.verdict.is_good()).count();
        writeln!(
            out,
            "verified {}: {} exact, {} quantized within bounds, {bad} off, {}; {:.1} s, {:.2} GB/s",
            file.display(),
            count(Verdict::Exact),
            count(Verdict::WithinBounds),
            counted(v.metadata.len(), "metadata difference"),
            seconds,
            v.bytes as f64 / seconds / 1e9
        )?;
        let missing = strata_core::convert::missing_head(v);
        if missing > 0 {
            let source = self.args.source.as_ref().or(self.args.input.as_ref());
            let source = source.map_or("FOLDER".to_string(), |s| s.display().to_string());
            writeln!(
                out,
                "the MTP head is missing ({}); restore it with: strata convert {} --mtp-from {source} -o OUT",
                counted(missing, "tensor"),
                file.display()
            )?;
        }
        Ok(())
    }
}

/// Names patterns that matched nothing: most likely they are misspelt.
fn warn_of_idle_patterns(overrides: &[Override], written: &[String]) {
    for o in overrides.iter().filter(|o| !written.iter().any(|name| o.pattern.matches(name))) {
        strata::errln!("warning: --tensor-type {}={}: no tensor matches this pattern", o.pattern.text(), o.ty.name());
    }
}

fn code(good: bool) -> ExitCode {
    if good { ExitCode::SUCCESS } else { ExitCode::from(BEYOND_THRESHOLD) }
}

fn count_part(tensors: &[TensorReport], part: &str) -> usize {
    tensors.iter().filter(|t| t.part == part).count()
}

/// Bytes of the safetensors files beside (or at) `source`, for the progress bar.
fn source_bytes(source: &Path) -> u64 {
    let folder = if source.is_dir() { source } else { source.parent().unwrap_or(Path::new(".")) };
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    files
        .filter(|f| f.path().extension().is_some_and(|e| e == "safetensors"))
        .filter_map(|f| f.metadata().ok())
        .map(|m| m.len())
        .sum()
}

/// Tensors by part, type and what was done; every one of them on request.
fn print_tensors(out: &mut impl Write, tensors: &[TensorReport], verbose: bool) -> std::io::Result<()> {
    if verbose {
        for t in tensors {
            let dims = t.dims.iter().map(u64::to_string).collect::<Vec<_>>().join("x");
            write!(out, "{:<44} {:<5} {dims:<16} {} <- {}", t.name, t.ty, t.done, t.source)?;
            writeln!(out, "{}", t.remark.as_ref().map(|r| format!(" ({r})")).unwrap_or_default())?;
        }
        return Ok(());
    }
    let mut groups: BTreeMap<(&str, &str, &str), (usize, u64)> = BTreeMap::new();
    for t in tensors {
        let group = groups.entry((t.part, &t.ty, &t.done)).or_default();
        group.0 += 1;
        group.1 += t.bytes;
    }
    for ((part, ty, done), (count, bytes)) in groups {
        let tensors = agreeing(count, "tensor ", "tensors");
        writeln!(out, "{part:<6} {ty:<5} {count:>5} {tensors} {:>10}  {done}", gigabytes(bytes))?;
    }
    let mut remarks: BTreeMap<&str, usize> = BTreeMap::new();
    for remark in tensors.iter().filter_map(|t| t.remark.as_deref()) {
        *remarks.entry(remark).or_default() += 1;
    }
    for (remark, count) in remarks {
        writeln!(out, "note: {}: {remark}", counted(count, "tensor"))?;
    }
    Ok(())
}

fn print_left_out(out: &mut impl Write, left_out: &[LeftOut], verbose: bool) -> std::io::Result<()> {
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for tensor in left_out {
        *reasons.entry(tensor.why).or_default() += 1;
        if verbose {
            writeln!(out, "left out: {} ({})", tensor.name, tensor.why)?;
        }
    }
    reasons.iter().try_for_each(|(why, count)| writeln!(out, "left out: {}: {why}", counted(*count, "tensor")))
}

/// `1.2 GB`, `850 kB`.
fn gigabytes(bytes: u64) -> String {
    let bytes = bytes as f64;
    match bytes {
        b if b >= 1e9 => format!("{:.2} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.1} kB", b / 1e3),
    }
}

fn print_json(value: &serde_json::Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, value)?;
    writeln!(out)?;
    Ok(())
}

fn report_json(report: &ConvertReport, seconds: f64) -> serde_json::Value {
    let left_out: Vec<_> = report.left_out.iter().map(|l| json!({ "name": l.name, "why": l.why })).collect();
    json!({
        "files": report.files,
        "seconds": seconds,
        "read_bytes": report.read_bytes,
        "written_bytes": report.written_bytes,
        "mtp_layers": report.mtp_layers,
        "tensors": report.tensors,
        "left_out": left_out,
        "notes": report.notes,
    })
}

fn graft_json(report: &GraftReport, seconds: f64) -> serde_json::Value {
    json!({
        "files": report.files,
        "seconds": seconds,
        "added": report.added,
        "dropped": report.dropped,
        "carried": report.carried,
        "carried_bytes": report.carried_bytes,
        "carried_sha256": report.carried_hash,
        "changed_keys": report.changed_keys,
        "notes": report.notes,
        "verification": report.verification.as_ref().map(|v| verification_json(v, seconds)),
    })
}

fn verification_json(v: &Verification, seconds: f64) -> serde_json::Value {
    json!({
        "good": v.is_good(),
        "seconds": seconds,
        "bytes": v.bytes,
        "metadata_differences": v.metadata,
        "tensors": v.tensors,
    })
}
