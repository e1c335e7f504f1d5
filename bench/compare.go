package main

// side measures one side of a comparison once.
type side func() (float64, error)

// comparison is two sides measured in turns.
type comparison struct {
	ours, hand, ratio series
}

// compare measures both sides in each of the runs. Who goes first alternates,
// because the second one may find a warmer or a more crowded machine.
func compare(runs int, name, unit string, ours, hand side) (comparison, error) {
	c := comparison{
		ours:  series{name: name + " outbox", unit: unit},
		hand:  series{name: name + " by hand", unit: unit},
		ratio: series{name: name + " ratio", unit: "outbox/hand"},
	}
	for run := range runs {
		turns := []struct {
			measure side
			into    *series
		}{{ours, &c.ours}, {hand, &c.hand}}
		if run%2 == 1 {
			turns[0], turns[1] = turns[1], turns[0]
		}
		for _, turn := range turns {
			v, err := turn.measure()
			if err != nil {
				return c, err
			}
			turn.into.runs = append(turn.into.runs, v)
		}
		c.ratio.runs = append(c.ratio.runs, c.ours.runs[run]/c.hand.runs[run])
	}
	return c, nil
}

// compare adds a comparison to the report and returns the median ratio.
func (b *bench) compare(name, unit string, ours, hand side) (float64, error) {
	c, err := compare(b.runs, name, unit, ours, hand)
	if err != nil {
		return 0, err
	}
	b.add(c.ours, c.hand, c.ratio)
	return c.ratio.median(), nil
}
