//! Which type each tensor is stored in: whole-file types, recipes per class of tensor, and patterns that override them.

use super::ConvertError;
use super::names::{Class, Part, class_of, layer_of};
use strata_kernels::format::TensorType;

/// A whole-file type or a recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipe {
    /// Every matrix in one type.
    Uniform(TensorType),
    /// llama.cpp's mix: Q4_K, more bits for the head, and for values and down matrices of some layers.
    Q4KM,
    /// The same with Q5_K.
    Q5KM,
    /// Expert gate and up Q4_K, expert down Q5_K or Q6_K, dense parts and embedding Q8_0, head Q6_K.
    UdQ4KXl,
}

const RECIPES: &str = "F32, F16, BF16, Q8_0, Q4_K, Q5_K, Q6_K, Q4_K_M, Q5_K_M, UD-Q4_K_XL";

impl Recipe {
    /// Reads a name, in any case.
    ///
    /// # Errors
    /// When nobody knows the name.
    pub fn from_name(name: &str) -> Result<Recipe, ConvertError> {
        Ok(match name.to_ascii_uppercase().as_str() {
            "Q4_K_M" => Recipe::Q4KM,
            "Q5_K_M" => Recipe::Q5KM,
            "UD-Q4_K_XL" => Recipe::UdQ4KXl,
            // llama.cpp's names for the plain ones.
            "Q4_K_S" => Recipe::Uniform(TensorType::Q4_K),
            "Q5_K_S" => Recipe::Uniform(TensorType::Q5_K),
            other => Recipe::Uniform(
                TensorType::from_name(other)
                    .filter(|t| t.computable())
                    .ok_or_else(|| ConvertError::BadType(format!("unknown type '{name}'; known are {RECIPES}")))?,
            ),
        })
    }

    /// The name, as for `--type`.
    pub fn name(self) -> &'static str {
        match self {
            Recipe::Uniform(ty) => ty.name(),
            Recipe::Q4KM => "Q4_K_M",
            Recipe::Q5KM => "Q5_K_M",
            Recipe::UdQ4KXl => "UD-Q4_K_XL",
        }
    }

    /// `general.file_type` of llama.cpp.
    pub fn file_type(self) -> u32 {
        match self {
            Recipe::Uniform(TensorType::F32) => 0,
            Recipe::Uniform(TensorType::F16) => 1,
            Recipe::Uniform(TensorType::Q8_0) => 7,
            Recipe::Uniform(TensorType::Q4_K) => 14,
            Recipe::Uniform(TensorType::Q5_K) => 16,
            Recipe::Uniform(TensorType::Q6_K) => 18,
            Recipe::Uniform(_) => 32,
            Recipe::Q4KM | Recipe::UdQ4KXl => 15,
            Recipe::Q5KM => 17,
        }
    }

    /// Whether anything is quantized.
    pub fn quantizes(self) -> bool {
        !matches!(self, Recipe::Uniform(TensorType::F32 | TensorType::F16 | TensorType::BF16))
    }

    /// The type for a class of tensor in layer `layer` of `layers`, of a model with `experts` experts.
    fn choose(self, class: Class, layer: Option<u64>, layers: u64, experts: u64) -> TensorType {
        let more = layer.is_some_and(|i| more_bits(i, layers));
        // llama.cpp spends more on the attention of models with exactly eight experts, where it is a small part.
        let eight = experts == 8;
        let mix = |base| match class {
            Class::Head => TensorType::Q6_K,
            Class::Value | Class::Key if eight => TensorType::Q8_0,
            Class::AttentionOut if eight => TensorType::Q5_K,
            Class::Value | Class::ExpertOut | Class::SharedOut if more => TensorType::Q6_K,
            _ => base,
        };
        match self {
            _ if class == Class::Small => TensorType::F32,
            Recipe::Uniform(ty) => ty,
            Recipe::Q4KM => mix(TensorType::Q4_K),
            Recipe::Q5KM => mix(TensorType::Q5_K),
            Recipe::UdQ4KXl => match class {
                Class::ExpertIn => TensorType::Q4_K,
                Class::ExpertOut if more => TensorType::Q6_K,
                Class::ExpertOut => TensorType::Q5_K,
                Class::Head => TensorType::Q6_K,
                // Small, and every step of the recurrence goes through them.
                Class::DeltaGate => TensorType::F32,
                _ => TensorType::Q8_0,
            },
        }
    }
}

/// The layers that get more bits in llama.cpp's mixes: the first and last eighth and every third between.
fn more_bits(layer: u64, layers: u64) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

/// Part of a tensor name: `*` stands for anything, `^` and `$` hold it to the beginning and the end.
#[derive(Clone, Debug, PartialEq)]
pub struct Pattern {
    text: String,
}

impl Pattern {
    /// Reads a pattern.
    ///
    /// # Errors
    /// When it is empty or uses more of the language of regular expressions than is known here.
    pub fn new(text: &str) -> Result<Pattern, ConvertError> {
        // A dot stands for itself and '\.' is how regular expressions write that.
        let text = text.replace("\\.", ".").replace(".*", "*");
        if text.is_empty() || text.contains(['[', ']', '(', ')', '|', '+', '?', '\\', '{', '}']) {
            return Err(ConvertError::BadType(format!(
                "cannot read the pattern '{text}': it is a part of a tensor name, in which '*' stands for anything and '^' and '$' for the ends"
            )));
        }
        Ok(Pattern { text })
    }

    /// The pattern as it was read.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the pattern is found in `name`.
    pub fn matches(&self, name: &str) -> bool {
        let (start, rest) = match self.text.strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (false, self.text.as_str()),
        };
        let (end, rest) = match rest.strip_suffix('$') {
            Some(rest) => (true, rest),
            None => (false, rest),
        };
        let pieces: Vec<&str> = rest.split('*').collect();
        let mut left = name;
        for (i, piece) in pieces.iter().enumerate() {
            let last = i + 1 == pieces.len();
            if i == 0 && start {
                match left.strip_prefix(piece) {
                    Some(tail) => left = tail,
                    None => return false,
                }
                if last && end {
                    return left.is_empty();
                }
            } else if last && end {
                return left.ends_with(piece);
            } else {
                match left.find(piece) {
                    Some(at) => left = &left[at + piece.len()..],
                    None => return false,
                }
            }
        }
        true
    }
}

/// `--tensor-type PATTERN=TYPE`.
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    /// Which tensors.
    pub pattern: Pattern,
    /// Their type.
    pub ty: TensorType,
}

impl Override {
    /// Reads `PATTERN=TYPE`.
    ///
    /// # Errors
    /// When there is no `=`, or the pattern or the type is unknown.
    pub fn parse(text: &str) -> Result<Override, ConvertError> {
        let (pattern, ty) =
            text.rsplit_once('=').ok_or_else(|| ConvertError::BadType(format!("'{text}' is not PATTERN=TYPE")))?;
        match Recipe::from_name(ty)? {
            Recipe::Uniform(ty) => Ok(Override { pattern: Pattern::new(pattern)?, ty }),
            recipe => Err(ConvertError::BadType(format!("'{text}': {} is a recipe, not a type", recipe.name()))),
        }
    }
}

/// Chooses the type of every tensor.
#[derive(Clone, Debug)]
pub struct TypeChooser {
    /// The recipe.
    pub recipe: Recipe,
    /// Overrides; the last that matches counts.
    pub overrides: Vec<Override>,
    /// The type of the MTP head's matrices, where it was asked for.
    pub mtp: Option<TensorType>,
    /// Trunk layers.
    pub layers: u64,
    /// Experts of a layer.
    pub experts: u64,
}

/// The type of one tensor, and a remark where it is not what the recipe says.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The type.
    pub ty: TensorType,
    /// Why it differs from what was asked for.
    pub remark: Option<String>,
}

impl TypeChooser {
    /// The type of a tensor.
    pub fn choose(&self, name: &str, dims: &[u64], part: Part) -> Choice {
        let class = class_of(name, dims);
        let asked = self.overrides.iter().rev().find(|o| o.pattern.matches(name)).map(|o| o.ty);
        if class == Class::Small {
            // Matrices among them may be kept as halves; vectors are F32 everywhere.
            let half = asked.filter(|ty| dims.len() >= 2 && matches!(ty, TensorType::F16 | TensorType::BF16));
            return Choice { ty: half.unwrap_or(TensorType::F32), remark: None };
        }
        if let Some(ty) = asked {
            return fit(ty, dims);
        }
        let chosen = self.recipe.choose(class, layer_of(name), self.layers, self.experts);
        if part == Part::Mtp {
            let floor = if is_k_quant(chosen) { TensorType::Q8_0 } else { chosen };
            return fit(self.mtp.unwrap_or(floor), dims);
        }
        fit(chosen, dims)
    }
}

fn is_k_quant(ty: TensorType) -> bool {
    ty.block_size() == 256
}

/// The type, or the next one whose blocks fit the rows.
fn fit(ty: TensorType, dims: &[u64]) -> Choice {
    let fits = |ty: TensorType| dims[0].is_multiple_of(ty.block_size() as u64);
    if fits(ty) {
        return Choice { ty, remark: None };
    }
    let instead = if fits(TensorType::Q8_0) { TensorType::Q8_0 } else { TensorType::F16 };
    let remark = format!(
        "{} instead of {}: rows of {} are no multiple of {}",
        instead.name(),
        ty.name(),
        dims[0],
        ty.block_size()
    );
    Choice { ty: instead, remark: Some(remark) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chooser(recipe: &str, overrides: &[&str]) -> TypeChooser {
        TypeChooser {
            recipe: Recipe::from_name(recipe).unwrap(),
            overrides: overrides.iter().map(|o| Override::parse(o).unwrap()).collect(),
            mtp: None,
            layers: 40,
            experts: 256,
        }
    }

    fn ty(c: &TypeChooser, name: &str, dims: &[u64]) -> TensorType {
        c.choose(name, dims, if name.starts_with("blk.40.") { Part::Mtp } else { Part::Trunk }).ty
    }

    #[test]
    fn patterns_match_parts_and_ends() {
        let m = |p: &str, n: &str| Pattern::new(p).unwrap().matches(n);
        assert!(m("ffn_*_exps", "blk.3.ffn_down_exps.weight"));
        assert!(m("attn_q", "blk.3.attn_qkv.weight"));
        assert!(!m("attn_q.weight", "blk.3.attn_qkv.weight"));
        assert!(m("^output", "output.weight") && !m("^output", "blk.0.attn_output.weight"));
        assert!(m("weight$", "output.weight") && !m("^output$", "output.weight"));
        assert!(m("^blk.*.ssm_out.weight$", "blk.12.ssm_out.weight"));
        assert!(m(r"blk\.40\..*exps", "blk.40.ffn_up_exps.weight"));
        assert!(Pattern::new("blk.(1|2)").is_err() && Pattern::new("").is_err());
    }

    #[test]
    fn the_head_stays_at_q8_0_unless_asked() {
        let dims = [2048, 512, 256];
        let c = chooser("Q4_K_M", &[]);
        assert_eq!(ty(&c, "blk.3.ffn_gate_exps.weight", &dims), TensorType::Q4_K);
        assert_eq!(ty(&c, "blk.40.ffn_gate_exps.weight", &dims), TensorType::Q8_0);
        assert_eq!(ty(&chooser("BF16", &[]), "blk.40.ffn_gate_exps.weight", &dims), TensorType::BF16);
        let asked = chooser("Q4_K_M", &["^blk.40.*exps=Q4_K"]);
        assert_eq!(ty(&asked, "blk.40.ffn_gate_exps.weight", &dims), TensorType::Q4_K);
        let mtp = TypeChooser { mtp: Some(TensorType::Q6_K), ..c };
        assert_eq!(ty(&mtp, "blk.40.attn_q.weight", &[2048, 8192]), TensorType::Q6_K);
        assert_eq!(ty(&mtp, "blk.40.nextn.enorm.weight", &[2048]), TensorType::F32);
    }

    #[test]
    fn recipes_choose_by_class() {
        let c = chooser("UD-Q4_K_XL", &["ssm_out=BF16", "ffn_gate_inp.weight=Q8_0"]);
        for (name, dims, expected) in [
            ("token_embd.weight", &[2048, 248320][..], TensorType::Q8_0),
            ("output.weight", &[2048, 248320], TensorType::Q6_K),
            ("blk.0.ffn_up_exps.weight", &[2048, 512, 256], TensorType::Q4_K),
            ("blk.0.ffn_down_exps.weight", &[512, 2048, 256], TensorType::Q6_K),
            ("blk.5.ffn_down_exps.weight", &[512, 2048, 256], TensorType::Q5_K),
            ("blk.0.attn_qkv.weight", &[2048, 8192], TensorType::Q8_0),
            ("blk.0.ssm_out.weight", &[4096, 2048], TensorType::BF16),
            ("blk.0.ssm_alpha.weight", &[2048, 32], TensorType::F32),
            ("blk.0.ffn_gate_inp.weight", &[2048, 256], TensorType::F32),
            ("blk.0.attn_norm.weight", &[2048], TensorType::F32),
        ] {
            assert_eq!(ty(&c, name, dims), expected, "{name}");
        }
    }

    #[test]
    fn the_mixes_are_those_of_llama_quantize() {
        // As llama-quantize Q4_K_M chose for 256 and for 8 experts.
        for (name, of_256, of_8) in [
            ("blk.0.attn_qkv.weight", TensorType::Q6_K, TensorType::Q8_0),
            ("blk.6.attn_qkv.weight", TensorType::Q4_K, TensorType::Q8_0),
            ("blk.7.attn_v.weight", TensorType::Q6_K, TensorType::Q8_0),
            ("blk.7.attn_k.weight", TensorType::Q4_K, TensorType::Q8_0),
            ("blk.7.attn_output.weight", TensorType::Q4_K, TensorType::Q5_K),
            ("blk.7.ffn_down_exps.weight", TensorType::Q6_K, TensorType::Q6_K),
            ("blk.7.ffn_down_shexp.weight", TensorType::Q6_K, TensorType::Q6_K),
            ("blk.6.ffn_down_shexp.weight", TensorType::Q4_K, TensorType::Q4_K),
            ("blk.6.ssm_out.weight", TensorType::Q4_K, TensorType::Q4_K),
        ] {
            let c = chooser("Q4_K_M", &[]);
            assert_eq!(ty(&c, name, &[2048, 2048]), of_256, "{name}");
            assert_eq!(ty(&TypeChooser { experts: 8, ..c }, name, &[2048, 2048]), of_8, "{name}");
        }
    }

    #[test]
    fn rows_that_are_no_whole_blocks_fall_back_out_loud() {
        let c = chooser("Q4_K", &[]);
        let choice = c.choose("blk.0.attn_q.weight", &[192, 64], Part::Trunk);
        assert_eq!(choice.ty, TensorType::Q8_0);
        assert_eq!(choice.remark.as_deref(), Some("Q8_0 instead of Q4_K: rows of 192 are no multiple of 256"));
        assert_eq!(c.choose("blk.0.attn_q.weight", &[20, 64], Part::Trunk).ty, TensorType::F16);
    }

    #[test]
    fn unknown_types_are_refused_with_the_known_ones() {
        let error = Recipe::from_name("Q3_K").unwrap_err().to_string();
        assert!(error.contains("'Q3_K'") && error.contains("UD-Q4_K_XL"), "{error}");
        assert!(Override::parse("attn_q").is_err() && Override::parse("attn_q=Q4_K_M").is_err());
    }
}
