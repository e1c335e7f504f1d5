package integration

import (
	"fmt"
	"slices"
	"strings"
)

// state is what the model knows of a committed message.
type state int

const (
	pending   state = iota
	waiting         // failed, its retry is not due
	dead            //
	discarded       //
	delivered       //
)

// message is a message as the model knows it.
type message struct {
	n     int // its number, which is its payload
	id    int64
	group string
	state state
	tries int
	// maybe: it was sent in a batch that was interrupted, so it may come again
	// although it was delivered.
	maybe bool
	// revived: it was dead and an operator retried it, so it goes before
	// whatever of its group was not sent yet.
	revived bool
	dedup   string
}

// model is what must have been promised: the committed messages of each group
// in the order of their commits.
type model struct {
	groups map[string][]*message
	byN    map[int]*message
	fault  []string
	maxTry int
}

func newModel(maxTry int) *model {
	return &model{groups: make(map[string][]*message), byN: make(map[int]*message), maxTry: maxTry}
}

// commit makes messages exist, in this order.
func (m *model) commit(added []*message) {
	for _, msg := range added {
		m.groups[msg.group] = append(m.groups[msg.group], msg)
		m.byN[msg.n] = msg
	}
}

func (m *model) faultf(format string, args ...any) {
	m.fault = append(m.fault, fmt.Sprintf(format, args...))
}

// sent checks that the message with number n may be sent now.
func (m *model) sent(n int, dedup string, attempts int) *message {
	msg := m.byN[n]
	if msg == nil {
		m.faultf("message %d was sent but never committed", n)
		return &message{}
	}
	if msg.dedup == "" {
		msg.dedup = dedup
	}
	switch {
	case msg.state == delivered && !msg.maybe:
		m.faultf("message %d was sent again although nothing was interrupted", n)
	case msg.state == dead || msg.state == discarded:
		m.faultf("message %d was sent although it is dead or discarded", n)
	case msg.state == waiting:
		m.faultf("message %d was sent before its retry was due", n)
	case dedup != msg.dedup:
		m.faultf("message %d has the identity %s, had %s", n, dedup, msg.dedup)
	case attempts != msg.tries:
		m.faultf("message %d has %d attempts, want %d", n, attempts, msg.tries)
	}
	if msg.group == "" || attempts > 0 { // a retry holds its group, also a revived message of it
		return msg
	}
	earlier := true
	for _, other := range m.groups[msg.group] {
		if other == msg {
			earlier = false
			continue
		}
		first := earlier && other.revived == msg.revived || other.revived && !msg.revived
		if first && (other.state == pending || other.state == waiting) {
			m.faultf("message %d of group %s was sent before %d", n, msg.group, other.n)
		}
	}
	return msg
}

// failed charges an attempt.
func (m *model) failed(msg *message, permanent bool) {
	msg.tries++
	msg.state, msg.revived = waiting, false
	if permanent || msg.tries >= m.maxTry {
		msg.state = dead
	}
}

// stranded lists the pending messages that nothing holds back.
func (m *model) stranded() []int {
	var list []int
	for group, messages := range m.groups {
		held := group != "" && slices.ContainsFunc(messages, func(msg *message) bool { return msg.state == waiting })
		for _, msg := range messages {
			if msg.state == pending && !held {
				list = append(list, msg.n)
			}
		}
	}
	slices.Sort(list)
	return list
}

// pick lists the numbers of the messages in one of the states, sorted.
func (m *model) pick(states ...state) []int {
	var list []int
	for n, msg := range m.byN {
		if slices.Contains(states, msg.state) {
			list = append(list, n)
		}
	}
	slices.Sort(list)
	return list
}

func (m *model) faults() string { return strings.Join(m.fault, "\n") }
