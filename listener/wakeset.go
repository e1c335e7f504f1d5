package listener

import (
	"maps"
	"slices"

	"github.com/gormoutbox/outbox/engine"
)

// maxHashes is the number of groups of an outbox that a round names. A
// notification for the whole outbox costs the receivers little more than many
// for its groups, and the sender less.
const maxHashes = 64

// wakeSet merges wakes, by outbox. Its size is bounded by the number of
// outboxes.
type wakeSet map[string]*groupSet

type groupSet struct {
	all    bool
	hashes map[uint64]struct{} // nil if all
}

func (s wakeSet) add(wakes []engine.Wake) {
	for _, w := range wakes {
		g := s[w.Outbox]
		if g == nil {
			g = &groupSet{hashes: make(map[uint64]struct{}, 1)}
			s[w.Outbox] = g
		}
		g.add(w)
	}
}

func (g *groupSet) add(w engine.Wake) {
	if g.all {
		return
	}
	if !w.All {
		g.hashes[w.Hash] = struct{}{}
	}
	if w.All || len(g.hashes) > maxHashes {
		g.all, g.hashes = true, nil
	}
}

// list gives the wakes by outbox and hash.
func (s wakeSet) list() []engine.Wake {
	var wakes []engine.Wake
	for _, outbox := range slices.Sorted(maps.Keys(s)) {
		g := s[outbox]
		if g.all {
			wakes = append(wakes, engine.Wake{Outbox: outbox, All: true})
		}
		for _, hash := range slices.Sorted(maps.Keys(g.hashes)) {
			wakes = append(wakes, engine.Wake{Outbox: outbox, Hash: hash})
		}
	}
	return wakes
}
