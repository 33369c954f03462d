"""A fixed English text of about three thousand tokens, written for this project and under its licence.

Perplexities are only comparable on the very same text: do not edit it.
"""

TEXT = """\
The ferry to the island left at six, and by half past five the quay was already full of people who had come too early \
and did not know what to do with their hands. Ilse had a suitcase, a rolled map in a cardboard tube, and a thermos of \
coffee that her brother had pressed on her at the last moment, as if the crossing took a week instead of fifty \
minutes. She sat down on a bollard and watched the gulls argue over a crust.

She had been hired to repair a tide gauge. It was not a grand position. The gauge stood in a stone well at the end of \
the old harbour, and for a hundred and forty years it had drawn the height of the sea on paper, first with a pen of \
brass and later with one of plastic, one line a day, seven lines to a sheet. Then somebody at the ministry had put an \
ultrasonic sensor next to it, the paper had run out, and nobody had ordered more. The sensor failed after three \
winters. Now they wanted the old machine back, at least until the new budget, and they had found Ilse, who repaired \
church clocks and had once mended a barograph for a lighthouse museum.

"You are the clock woman," said the man who sat down next to her. It was not quite a question. He was perhaps seventy, \
with a knitted cap and the careful movements of someone who had hurt his back more than once. "I am Anders. I kept the \
book, before. I wrote down when the paper was changed, and by how much the clock was off, and whether there was ice."

"Do you still have the book?" she asked.

"I have all of them," said Anders. "They are dry. That is more than you can say of the well."

The ferry came in backwards, as it always did, and for a while there was only the noise of engines and of chains. They \
went on board together. The sea was flat and grey and smelled of iron. Anders explained, without being asked, that the \
gauge had three enemies. The first was mud, which crept through the pipe that joined the well to the harbour and made \
the water inside follow the water outside more and more slowly, until the curve was smooth and beautiful and wrong. The \
second was the clock, which ran fast in summer because the attendant wound it too tightly, and slow in winter because \
the oil grew thick. The third enemy was people. People leaned on things. People opened the lid to see what was inside. \
Once a wedding party had put a bottle into the well to cool it, and for two days the record showed a tide that no moon \
could have made.

Ilse laughed, and then she took out a pencil and wrote the three enemies down.

The harbour of the island had been built for herring, in a century when there was herring. There were more sheds than \
boats now. The gauge house was a small round tower with a copper roof, and it had a door so low that even she had to \
bend. Inside it was colder than outside. A wooden staircase went once around the wall and ended at a platform over the \
well, and on the platform, under a glass case that somebody had cracked and somebody else had mended with tape, stood \
the machine.

It was simpler than she had feared. A float hung in the well on a thin bronze wire. The wire ran over a wheel, and the \
wheel, through two gears, moved a carriage from left to right, one centimetre for every ten of water. The carriage held \
the pen. A drum turned under it, driven by a clock, once in twenty-four hours. That was all. When the sea rose the pen \
went to the right, and when it fell the pen went to the left, and as the drum turned the pen drew a wave. Every \
instrument that she loved had this quality: you could explain it to a child in a minute, and it took a lifetime to make \
it tell the truth.

She began with what she knew. The clock had eight days of spring and a lever escapement, and it was so dirty that the \
oil had turned to something like amber. She took it out, carried it to the room above the bakery that the ministry had \
rented for her, and spent two days on it. She cleaned each wheel in spirit and each hole with a sharpened stick of \
boxwood. Two pivots were scored and had to be polished; one bush was worn to an oval and had to be replaced. When it \
was together again she let it run on the windowsill, next to a clock that took its time from a satellite, and wrote \
down the difference every six hours. It gained eleven seconds a day. She moved the regulator by the width of a hair and \
it lost four. She left it there. Four seconds was less than the width of the line that the pen would draw.

On the third day she climbed down into the well. Anders held the rope and disapproved. The ladder was made of iron and \
had been painted so often that the rungs were as thick as her wrist. At the bottom she stood in water up to her knees \
and felt along the wall for the mouth of the pipe. There was supposed to be a grating. There was none. She put her arm \
in as far as the shoulder and touched something soft, which was mud, and something hard, which was not.

"What is it?" called Anders.

"A bottle," she said.

He was silent for a moment. "I told them," he said then, with great satisfaction, "that they had only taken out one."

To clean the pipe they needed a pump, and to get a pump they needed the fire brigade, which on the island consisted of \
the baker, the teacher, two sisters who rented out bicycles, and a young man named Jonas who was the only one to have \
been trained. They came on Saturday with a great deal of hose. By noon there was a fan of brown water in the harbour \
and a smell that nobody would forget, and by two o'clock the pipe was clear. The teacher had brought her class, nine \
children between six and twelve, and Ilse let each of them look down into the well with a lamp.

"Why is it important how high the water is?" asked a girl with a plaster on her chin.

It was the question that Ilse had asked herself on the ferry. She could have said that ships needed to know whether \
they would touch the ground, or that the people who built dikes needed to know how high to build them. Both were true. \
But she thought of the books in the house of Anders, forty-one volumes, in which six people in turn had written a line \
a day about the ice and the clock.

"Because it changes so slowly that no one can see it," she said. "You look at the sea and it goes up and down, twice a \
day, and if there is a storm it goes up more. If you want to know whether it is higher than it was for your \
grandmother, you cannot look at the sea. You have to look at the paper. And the paper is only worth something if \
somebody was there every day and did not make things up when they had forgotten."

"Did they ever forget?" asked the girl.

"Yes," said Anders from the stairs. "And then they left the page empty. That is the most important rule. If you do not \
know, you leave it empty."

In the second week she set the zero. A gauge that moves correctly but starts from the wrong height is worse than none, \
for it is believed. Outside, in the wall of the tower, there was a bolt of bronze with a rounded head, and its height \
above the level of the mainland had been measured in eight different years, by eight different surveyors, with results \
that agreed to within three millimetres. That was either very good work or very polite copying. She decided to trust \
it. With a steel tape she measured from the bolt to the water in the well, at high tide and at low tide, in calm weather, \
ten times each, and Jonas wrote down the numbers, because a person who measures should not also be the person who \
writes. Then she shifted the pen on its carriage until what it drew was what they had measured.

There remained the matter of paper. The mill that had made it was closed. The sheets had been printed with a grid in \
pale green, with the hours along one side and the centimetres along the other, and they were cut so that they met on \
the drum without a gap. Ilse asked at four printers. The first did not answer, the second wanted to sell ten thousand, \
and the third asked whether she could not simply use a computer. The fourth was a woman in a town by the lake who \
printed programmes for a puppet theatre. She asked what the paper was for, and when Ilse had told her she was quiet for \
a while and then said that she would need to know how the paper behaved when it was damp, since everything on a boat or \
near one was damp, and paper grows across its grain and not along it. If the grid was printed the wrong way round, she \
said, the centimetres would become longer in autumn.

Nobody at the ministry had thought of this in a hundred and forty years, or else somebody had thought of it at the very \
beginning and chosen the right direction, and no one had needed to think of it since. Ilse held one of the old sheets \
over the kettle of the baker and measured it with a rule. It grew by half a millimetre along the hours and by nothing at \
all along the centimetres. She wrote to the printer that the old ones had known.

The machine was started on a Thursday, at noon, with the tide going out. There was no ceremony, though the baker had \
made a cake in the shape of a drum, with a wave of blue sugar. Anders wound the clock. He did it slowly, nine turns and \
not ten, and looked at Ilse over his glasses so that she would remember. Jonas let down the float. The girl with the \
plaster, which had moved to her elbow, was allowed to lower the pen.

At first nothing seemed to happen. The pen stood on the paper and made a dot. People shifted their feet. Then, if one \
knelt and looked along the drum against the light, one could see that the dot had become a very short line, and that \
the line leaned, by almost nothing, to the left. The sea was falling, and here was the proof of it.

"Now we wait," said Anders, and opened a new book. He wrote the date, and the hour, and the height, and that the clock \
was right, and that there was no ice. He blew on the ink. Under the heading for remarks he thought for a long time, and \
then he wrote a single word, and turned the book around so that she could read it. It said: resumed.

She stayed until the end of the month. Each morning she walked out to the tower before breakfast, looked at the line of \
the night, and compared it with what the tables had promised. The tables were computed far away from the movement of \
the moon and the sun, and they knew nothing of wind. The difference between the table and the line was the weather, \
drawn by itself: a slow swelling when the air was light, a dip when it was heavy, and once, after a night in which the \
shutters had banged until dawn, a hill of forty centimetres that came and went within five hours and that nobody on the \
island had noticed, since they had been asleep or busy with the shutters.

On her last evening Anders came to the room above the bakery with a parcel. In it was the first book, the one that \
began in the year when the tower was built. He did not give it to her; he only wanted her to see it. The ink had gone \
brown. The first attendant had been a retired pilot, and his hand was large and even. He had not missed a day in eleven \
years. Then there came a week of empty lines, and after it the writing was smaller and rounder.

"His daughter," said Anders. "She was nineteen. They did not pay her for the first two years, since it was his name in \
the register. She kept it for fifty-three."

Ilse turned the pages. Twenty-third of January: clock slow two minutes, thick ice, cut free the float. Twenty-fourth of \
January: clock right, thick ice. Twenty-fifth: clock right, thick ice, seal in the harbour. It went on like that, page \
after page, a life in which almost nothing was said and nothing at all was invented. Somewhere in the middle, between \
two ordinary days in June, there was a remark that had been written and then crossed out so thoroughly that not a letter \
could be read.

"We have always wondered," said Anders.

"Leave it empty," said Ilse, and closed the book.

The ferry left at six in the morning. There was a little fog, and the tower was only a darker place in it. She stood at \
the stern with the thermos, which the baker had filled, and tried to think of the work that waited for her at home: a \
church clock with a broken tooth, a music box, the regulator of a railway station that was no longer a station. But she \
kept thinking of the pen. It was moving now, while she went away, by the thickness of a line, and it would be moving \
tonight and in the winter, and if they wound it with nine turns and kept the children from the well it would go on \
after all of them. What it wrote was of no use today and of little use tomorrow. It was a kind of letter, she thought, \
addressed to someone who would know what to ask. All one could do was to write clearly, to keep the sheets dry, and to \
leave out what one did not know.
"""
