package engine

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gormoutbox/outbox/backoff"
)

// simLane is a partition in memory, with a relay that can only say that a
// batch failed. It does with a worker's health what the worker does.
type simLane struct {
	config  OutboxConfig
	health  *health
	queue   []Envelope
	poison  map[int64]bool // never gets through
	waiting map[int64]bool // charged, and not yet due again
	down    bool           // the destination
	panics  bool           // the relay, instead of returning its error

	calls     int
	holds     int
	delivered []Envelope
	charged   map[int64]int
	onset     bool // the destination went down since something got through
	innocent  int  // messages charged that were not poison, nor was there an onset
}

func newSimLane(o Ordering, batchSize int) *simLane {
	config := OutboxConfig{Ordering: o, BatchSize: batchSize, Backoff: backoff.Constant(time.Second)}.withDefaults()
	return &simLane{
		config: config, health: newHealth(&config),
		poison: make(map[int64]bool), waiting: make(map[int64]bool), charged: make(map[int64]int),
	}
}

// add appends a message: of a group, or of none if group is empty.
func (l *simLane) add(group string, poison bool) *Envelope {
	id := int64(len(l.queue) + len(l.delivered) + 1)
	l.queue = append(l.queue, Envelope{ID: id, GroupKey: group})
	l.poison[id] = poison
	return &l.queue[len(l.queue)-1]
}

func (l *simLane) addHealthy(n int) {
	for i := range n {
		l.add(fmt.Sprintf("healthy-%d-%d", len(l.queue)+len(l.delivered), i), false)
	}
}

func (l *simLane) setDown(down bool) {
	l.onset = l.onset || down && !l.down
	l.down = down
}

// fetch is what a storage does: in id order, without what is blocked or left
// aside.
func (l *simLane) fetch() []Envelope {
	var batch []Envelope
	blocked := make(map[string]bool)
	for i := range l.queue {
		env := &l.queue[i]
		group := l.config.group(env)
		if l.waiting[env.ID] {
			blocked[group] = group != ""
		}
		skipped := slices.Contains(l.health.suspects.ids, env.ID) || slices.Contains(l.health.suspects.groups, env.GroupKey)
		if len(batch) < l.health.limit && !l.waiting[env.ID] && !blocked[group] && !skipped {
			batch = append(batch, *env)
		}
	}
	return batch
}

// relay answers for a batch.
func (l *simLane) relay(batch []Envelope) error {
	l.calls++
	if !l.down && !slices.ContainsFunc(batch, func(e Envelope) bool { return l.poison[e.ID] }) {
		return nil
	}
	if l.panics {
		return panicError(errBroken)
	}
	return errBroken
}

// step is one turn of the worker's cycle. It reports whether the cycle goes on
// without a wait.
func (l *simLane) step() bool {
	batch := l.fetch()
	if len(batch) == 0 {
		if l.health.exhausted() == hold {
			return l.hold()
		}
		return false
	}
	searched := l.health.searching()
	out := l.config.judge(batch, l.relay(batch), time.Now())
	switch l.health.after(batch, &out) {
	case blame:
		l.charge(&batch[0])
	case hold:
		return l.hold()
	case carryOn:
		l.settle(&out)
	}
	return searched || l.health.searching() || len(l.fetch()) > 0
}

func (l *simLane) hold() bool {
	l.holds++
	l.health.window()
	return false
}

func (l *simLane) charge(env *Envelope) {
	if !l.poison[env.ID] && !l.panics {
		if !l.onset {
			l.innocent++
		}
		l.onset = false
	}
	l.charged[env.ID]++
	l.waiting[env.ID] = true
	l.queue[slices.IndexFunc(l.queue, func(e Envelope) bool { return e.ID == env.ID })].Attempts++
}

func (l *simLane) settle(out *outcome) {
	for _, id := range out.settlement.Delivered {
		i := slices.IndexFunc(l.queue, func(e Envelope) bool { return e.ID == id })
		l.delivered = append(l.delivered, l.queue[i])
		l.queue = slices.Delete(l.queue, i, i+1)
		l.onset = l.down
	}
}

// run works until the worker would wait, as many times as there are windows.
func (l *simLane) run(t interface{ Fatalf(string, ...any) }, windows int) {
	for range windows {
		for turns := 0; l.step(); turns++ {
			if turns > 10*(len(l.queue)+len(l.delivered)+10) {
				t.Fatalf("the worker spins: %+v", l.health)
			}
		}
	}
}

// due makes all retries due.
func (l *simLane) due() { clear(l.waiting) }

func (l *simLane) wantCharged(t *testing.T, want map[int64]int) {
	t.Helper()
	for id, n := range l.charged {
		if want[id] != n {
			t.Errorf("message %d was charged %d times, want %d", id, n, want[id])
		}
	}
	for id, n := range want {
		if l.charged[id] == 0 {
			t.Errorf("message %d was not charged, want %d times", id, n)
		}
	}
}

// C46: an outage charges nobody, however long it lasts and whatever was before.
func TestOutageChargesNobody(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		ordering := rapid.SampledFrom([]Ordering{ByGroup, Total, None}).Draw(t, "ordering")
		l := newSimLane(ordering, rapid.SampledFrom([]int{1, 2, 10, 100}).Draw(t, "batch size"))
		for range rapid.IntRange(0, 5).Draw(t, "healthy windows") {
			l.addHealthy(rapid.IntRange(0, 30).Draw(t, "messages"))
			l.run(t, 1)
		}
		l.setDown(true)
		l.onset = false // no excuse: the outage begins between two runs
		for range rapid.IntRange(1, 40).Draw(t, "windows") {
			for range rapid.IntRange(0, 5).Draw(t, "added") {
				env := l.add(rapid.SampledFrom([]string{"", "a", "b", "c"}).Draw(t, "group"), false)
				env.Attempts = rapid.IntRange(0, 2).Draw(t, "attempts before")
			}
			before := l.calls
			l.run(t, 1)
			if n := l.calls - before; n > triesPerWindow+1 {
				t.Fatalf("%d calls in one window of an outage", n)
			}
		}
		if len(l.charged) > 0 {
			t.Fatalf("charged: %v", l.charged)
		}
		l.setDown(false)
		l.run(t, 50)
		if len(l.queue) > 0 || len(l.charged) > 0 {
			t.Fatalf("after the outage: %d messages are left, charged %v", len(l.queue), l.charged)
		}
	})
}

// Rule 4: one message that never gets through is found and charged; the others
// flow, without a wait.
func TestPoisonIsFound(t *testing.T) {
	t.Parallel()
	for _, batchSize := range []int{1, 2, 7, 100} {
		for at := range 12 {
			t.Run(fmt.Sprintf("batch of %d, message %d", batchSize, at), func(t *testing.T) {
				t.Parallel()
				l := newSimLane(ByGroup, batchSize)
				l.addHealthy(3)
				l.run(t, 1) // the destination is known to be up
				l.addHealthy(at)
				culprit := l.add("poison", true).ID
				l.add("poison", false)
				l.addHealthy(40 - at)
				l.run(t, 1)
				if l.holds > 0 || len(l.delivered) != 43 {
					t.Errorf("%d waits, %d messages delivered, want none and 43", l.holds, len(l.delivered))
				}
				l.wantCharged(t, map[int64]int{culprit: 1})
				l.addHealthy(2 * batchSize)
				l.run(t, 1)
				if l.health.limit != batchSize {
					t.Errorf("batches are still of %d", l.health.limit)
				}
			})
		}
	}
}

// A poison message that was charged before is looked for at once, each time
// that its retry is due.
func TestPoisonIsFoundAgain(t *testing.T) {
	t.Parallel()
	l := newSimLane(ByGroup, 10)
	l.addHealthy(1)
	l.run(t, 1)
	culprit := l.add("poison", true).ID
	for range 5 {
		l.addHealthy(20)
		l.run(t, 1)
		l.due()
		l.health.window() // nothing is known of the destination any more
	}
	if l.holds > 0 || len(l.delivered) != 101 {
		t.Errorf("%d waits, %d messages delivered, want none and 101", l.holds, len(l.delivered))
	}
	l.wantCharged(t, map[int64]int{culprit: 5})
}

// C41
func TestManyPoisonMessagesAreFound(t *testing.T) {
	t.Parallel()
	for _, n := range []int{2, 3, 4, 10, 40} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			l := newSimLane(ByGroup, 10)
			want := make(map[int64]int)
			for i := range n {
				group := fmt.Sprintf("poison-%d", i)
				want[l.add(group, true).ID] = 1
				l.add(group, false)
			}
			l.addHealthy(2 * n)
			l.run(t, narrowAfter+n)
			l.wantCharged(t, want)
			if len(l.delivered) != 2*n {
				t.Errorf("%d messages delivered, want %d", len(l.delivered), 2*n)
			}
		})
	}
}

// With nobody to compare it with, a message is not blamed.
func TestLonelyPoisonIsAnOutage(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]Ordering{"alone in its lane": ByGroup, "ahead of a total order": Total} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newSimLane(o, 10)
			l.addHealthy(5)
			l.run(t, 1)
			l.add("poison", true)
			if o == Total {
				l.addHealthy(5)
			}
			l.run(t, 20)
			l.wantCharged(t, nil)
			if len(l.delivered) != 5 || l.holds != 20 {
				t.Errorf("%d messages delivered, %d waits; want 5 and 20", len(l.delivered), l.holds)
			}
		})
	}
}

// In a total order what was ahead of the poison message still goes out.
func TestTotalOrderNarrowsDownToThePoison(t *testing.T) {
	t.Parallel()
	l := newSimLane(Total, 10)
	l.addHealthy(5)
	l.add("", true)
	l.addHealthy(5)
	l.run(t, 10)
	if len(l.delivered) != 5 {
		t.Errorf("%d messages delivered, want 5", len(l.delivered))
	}
}

// C53: a panic of the relay is never the destination's doing.
func TestPanickingRelayIsBlamedAtOnce(t *testing.T) {
	t.Parallel()
	l := newSimLane(ByGroup, 10)
	l.panics = true
	l.addHealthy(2)
	culprit := l.add("poison", true).ID
	l.addHealthy(20)
	l.run(t, 1)
	l.wantCharged(t, map[int64]int{culprit: 1})
	if l.holds > 0 || len(l.delivered) != 22 {
		t.Errorf("%d waits, %d delivered", l.holds, len(l.delivered))
	}
}

// A relay that says itself that the destination is down is believed, also by
// somebody who looks for a culprit.
func TestDeclaredOutageBlamesNobody(t *testing.T) {
	t.Parallel()
	l := newSimLane(ByGroup, 10)
	l.addHealthy(1)
	l.add("poison", true)
	l.addHealthy(20)
	l.run(t, 1)
	for range 10 {
		batch := l.fetch()
		out := l.config.judge(batch, &BatchError{Outage: errBroken, Failed: notAttempted(batch)}, time.Now())
		if got := l.health.after(batch, &out); got != hold {
			t.Fatalf("reaction %d, want a wait", got)
		}
		l.health.window()
	}
}

func notAttempted(batch []Envelope) map[int64]error {
	failed := make(map[int64]error)
	for _, env := range batch {
		failed[env.ID] = ErrNotAttempted
	}
	return failed
}

// healthMachine drives a lane with a destination that comes and goes.
type healthMachine struct{ *simLane }

func (m healthMachine) Add(t *rapid.T) {
	m.add(rapid.SampledFrom([]string{"", "a", "b", "c", "d", "e"}).Draw(t, "group"), rapid.IntRange(0, 9).Draw(t, "poison") == 0)
}
func (m healthMachine) AddHealthy(t *rapid.T) { m.addHealthy(rapid.IntRange(1, 20).Draw(t, "n")) }
func (m healthMachine) Step(*rapid.T)         { m.step() }
func (m healthMachine) Run(t *rapid.T)        { m.run(t, 1) }
func (m healthMachine) Due(*rapid.T)          { m.due() }
func (m healthMachine) Toggle(*rapid.T)       { m.setDown(!m.down) }

// Check is what always holds: nobody is charged for an outage, save one
// message where the outage began since something last got through, and no
// group is out of order.
func (m healthMachine) Check(t *rapid.T) {
	if m.innocent > 0 {
		t.Fatalf("an outage was charged: %v", m.charged)
	}
	last := make(map[string]int64)
	for _, env := range m.delivered {
		if m.poison[env.ID] {
			t.Fatalf("message %d cannot have got through", env.ID)
		}
		if env.GroupKey != "" && env.ID < last[env.GroupKey] {
			t.Fatalf("message %d was delivered after %d of its group", env.ID, last[env.GroupKey])
		}
		last[env.GroupKey] = env.ID
	}
	if n := len(m.health.suspects.ids) + len(m.health.suspects.groups); n > maxSuspects {
		t.Fatalf("%d suspects", n)
	}
}

func TestHealthStateMachine(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := healthMachine{newSimLane(ByGroup, rapid.SampledFrom([]int{1, 3, 20}).Draw(t, "batch size"))}
		t.Repeat(rapid.StateMachineActions(m))

		// The destination stays up and messages keep coming: in the end every
		// one that is not behind poison got through, and all poison is charged.
		m.setDown(false)
		for range 60 {
			m.addHealthy(4)
			m.run(t, 1)
			m.Check(t)
		}
		poisoned := make(map[string]bool)
		for _, env := range m.queue {
			head := env.GroupKey == "" || !poisoned[env.GroupKey]
			switch {
			case head && m.charged[env.ID] == 0 && !m.poison[env.ID]:
				t.Fatalf("message %d is left and was not even charged", env.ID)
			case head && m.poison[env.ID] && m.charged[env.ID] == 0:
				t.Fatalf("poison message %d was never charged", env.ID)
			}
			poisoned[env.GroupKey] = true
		}
	})
}
