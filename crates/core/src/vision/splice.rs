//! The positions of a picture's rows in a prompt.
//!
//! Every row has a position (t, h, w). A token at position p has (p, p, p). A picture that starts at position p gives
//! its merged block (r, c) the position (p, p + r, p + c), and what follows goes on at p + max(rows, columns): a picture
//! takes as many rows of context as it has blocks, but moves the positions on by its longer side only.

/// The position (t, h, w) of merged block `index` of a picture of `grid` (rows, columns) that starts at position `start`.
pub fn block_position(grid: (u32, u32), start: u32, index: u32) -> [u32; 3] {
    let columns = grid.1.max(1);
    [start, start + index / columns, start + index % columns]
}

/// How far a picture of `grid` (rows, columns) moves the positions on.
pub fn position_span(grid: (u32, u32)) -> u32 {
    grid.0.max(grid.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_go_down_and_across_and_what_follows_is_past_the_longer_side() {
        let grid = (2, 3);
        let positions: Vec<_> = (0..6).map(|index| block_position(grid, 2, index)).collect();
        assert_eq!(positions, [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]]);
        assert_eq!((position_span(grid), position_span((5, 1))), (3, 5));
    }
}
